// The page: what the user does, and what is shown of the chat.

import { Away, get, hasKey, setKey } from "./api.js";
import { again, answer, branchOf, canGoOn, extend, fieldsOf, fork, load, messagesOf, requestOf, save, show, write } from "./chat.js";
import { asCurl, asPython } from "./code.js";
import { forgetEngine, showEngine } from "./engine.js";
import { Alternatives, moveBetweenTokens, tokenElement } from "./tokens.js";

const $ = (selector) => document.querySelector(selector);
const chat = load();
const elements = new WeakMap(); // turn -> its element
let writing = null; // {turn, stop, done}: the answer that is written
let wake = () => {}; // ends the wait for the next look at the server

// ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────

function made(name, className, text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}

function button(text, action, label = text) {
  const element = made("button", "", text);
  element.type = "button";
  element.setAttribute("aria-label", label);
  element.addEventListener("click", action);
  return element;
}

function render() {
  alternatives.close();
  $("#turns").replaceChildren(...chat.turns.map(turnElement));
  $("#empty").hidden = chat.turns.length > 0;
  renderControls();
}

function renderControls() {
  $("#send").hidden = Boolean(writing);
  $("#stop").hidden = !writing;
}

function turnElement(turn) {
  const element = made("article", `turn ${turn.role}`);
  elements.set(turn, element);
  if (turn.role === "user") {
    element.setAttribute("aria-label", "You");
    element.append(made("p", "text", turn.content));
    return element;
  }
  element.setAttribute("aria-label", "Answer");
  const tokens = made("p", "tokens");
  tokens.setAttribute("role", "group");
  tokens.setAttribute("aria-label", "Tokens: arrow keys move between them, Enter shows alternatives");
  element.append(tokens, made("div", "facts note"));
  renderAnswer(turn);
  return element;
}

// What an answer has more than is shown of it.
function renderAnswer(turn) {
  const branch = branchOf(turn);
  const tokens = elements.get(turn).querySelector(".tokens");
  for (let at = tokens.childElementCount; at < branch.tokens.length; at++) tokens.append(tokenElement(branch.tokens[at], at));
  elements.get(turn).querySelector(".facts").replaceChildren(...facts(turn, branch));
}

function facts(turn, branch) {
  if (!branch.end) return [made("span", "", branch.tokens.length ? "…" : "The model reads …")];
  const shown = [];
  if (turn.branches.length > 1) shown.push(...branchButtons(turn));
  shown.push(made("span", "", `${branch.tokens.length} tokens`));
  const { usage } = branch;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) shown.push(made("span", "", `${cached} of ${usage.prompt_tokens} read from the cache`));
  const drafts = usage?.completion_tokens_details;
  const all = drafts ? drafts.accepted_prediction_tokens + drafts.rejected_prediction_tokens : 0;
  if (all) {
    shown.push(made("span", "", `${drafts.accepted_prediction_tokens} of ${all} drafted accepted`));
  }
  const ends = { stop: "", length: "as long as allowed", stopped: "stopped", away: "broken off" };
  if (ends[branch.end]) shown.push(made("span", "", ends[branch.end]));
  if (!(branch.end in ends)) shown.push(problem(branch.end));
  if (canGoOn(branch)) shown.push(button("Go on", () => goOn(turn), "Go on with this answer"));
  shown.push(button("Again", () => rewrite(turn), "Write this answer again"));
  if (branch.seed !== null) {
    shown.push(button(`Seed ${branch.seed}`, () => useSeed(branch.seed), `Use the seed ${branch.seed} of this answer`));
  }
  return shown;
}

function branchButtons(turn) {
  const to = (at) => async () => {
    await stopped();
    show(chat, turn, at);
    keep();
    render();
    elements.get(turn).querySelector(`.facts button[data-to="${at > 0 ? at - 1 : at + 1}"]`)?.focus();
  };
  const back = button("‹", to(turn.at - 1), "The branch before");
  const forth = button("›", to(turn.at + 1), "The next branch");
  back.dataset.to = turn.at - 1;
  forth.dataset.to = turn.at + 1;
  back.disabled = turn.at === 0;
  forth.disabled = turn.at === turn.branches.length - 1;
  return [back, made("span", "", `Branch ${turn.at + 1} of ${turn.branches.length}`), forth];
}

function problem(message) {
  const element = made("span", "problem", message);
  element.setAttribute("role", "alert");
  return element;
}

// ── what is said to screen readers: whole sentences as they come ─────────────────────────────────────────────────

let unsaid = "";

function say(text, whole = false) {
  unsaid += text;
  const end = whole ? unsaid.length : unsaid.search(/[.!?:]\s[^.!?]*$/) + 1;
  if (end < 1) return;
  $("#said").append(made("p", "", unsaid.slice(0, end)));
  while ($("#said").childElementCount > 5) $("#said").firstElementChild.remove();
  unsaid = unsaid.slice(end);
}

// ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

async function run(turn) {
  const controller = new AbortController();
  writing = { turn, stop: () => controller.abort() };
  writing.done = written(turn, controller.signal);
  await writing.done;
}

async function written(turn, signal) {
  const branch = branchOf(turn);
  let said = branch.content.length;
  let isDue = false;
  const changed = () => {
    if (isDue) return;
    isDue = true;
    setTimeout(() => {
      isDue = false;
      refresh();
    }, 30);
  };
  const refresh = () => {
    if (branchOf(turn) !== branch || !elements.get(turn)?.isConnected) return;
    const isAtEnd = innerHeight + scrollY > document.documentElement.scrollHeight - 80;
    renderAnswer(turn);
    say(branch.content.slice(said));
    said = branch.content.length;
    keepSoon();
    if (isAtEnd) scrollTo(0, document.documentElement.scrollHeight);
  };
  renderAnswer(turn);
  renderControls();
  try {
    await write(chat, turn, signal, changed);
  } catch (error) {
    if (error.name === "AbortError") branch.end = "stopped";
    else if (error instanceof Away) branch.end = "away";
    else branch.end = error.message;
    if (error instanceof Away) lost(error);
    if (error.status === 401) askForKey();
  }
  writing = null;
  refresh();
  say("", true);
  renderControls();
  keep();
}

async function stopped() {
  writing?.stop();
  await writing?.done;
}

async function send(event) {
  event.preventDefault();
  const content = $("#prompt").value;
  if (!content.trim() || writing || !$("#settings-form").reportValidity()) return;
  $("#prompt").value = "";
  chat.turns.push({ role: "user", content });
  answer(chat);
  render();
  scrollTo(0, document.documentElement.scrollHeight);
  await run(chat.turns.at(-1));
}

async function goOn(turn) {
  await stopped();
  extend(branchOf(turn));
  await run(turn);
}

async function rewrite(turn) {
  await stopped();
  again(chat, turn);
  render();
  await run(turn);
}

// A click on an alternative.
async function choose(element, token) {
  const turn = turnOf(element);
  const at = Number(element.dataset.at);
  await stopped();
  const branch = fork(chat, turn, at, token);
  render();
  const chosen = elements.get(turn).querySelector(`.token[data-at="${at}"]`);
  elements.get(turn).querySelector(".token").tabIndex = -1;
  chosen.tabIndex = 0;
  chosen.focus();
  keep();
  if (!branch.end) await run(turn);
}

function turnOf(element) {
  return chat.turns.find((turn) => elements.get(turn)?.contains(element));
}

const alternatives = new Alternatives(
  $("#alternatives"), (element) => branchOf(turnOf(element)).tokens[element.dataset.at], choose);

// ── the server: there, away, back again ──────────────────────────────────────────────────────────────────────────

let models = null;
let failures = 0;

function lost(error) {
  $("#trouble-text").textContent = `${error.message} The page asks again until it is there, and goes on then.`;
  $("#trouble").hidden = false;
}

function found() {
  failures = 0;
  if ($("#trouble").hidden) return;
  $("#trouble").hidden = true;
  say("The server is there again.", true);
}

function askForKey() {
  $("#key-form").hidden = false;
  $("#key-problem").textContent = hasKey() ? "The server does not take this key." : "";
  $("#key").focus();
}

// Look at the server again and again: often while it answers, ever more seldom while it does not.
async function watch() {
  for (;;) {
    let seconds = document.hidden ? 10 : 1;
    try {
      if (!models) showModels((await get("v1/models")).data.map((model) => model.id));
      const stats = await get("stats");
      found();
      if (stats[chat.model]) showEngine(stats[chat.model]);
      const last = chat.turns.at(-1);
      if (!writing && last?.role === "assistant" && branchOf(last).end === "away") run(last);
    } catch (error) {
      models = null;
      if (error.status === 401) {
        askForKey();
        seconds = 3600; // a key ends the wait
      } else {
        lost(error);
        seconds = Math.max(error.seconds ?? 0, Math.min(30, 2 ** failures++));
      }
    }
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, 1000 * seconds);
    });
  }
}

function showModels(names) {
  models = names;
  if (!names.includes(chat.model)) [chat.model] = names;
  $("#model").replaceChildren(...names.map((name) => made("option", "", name)));
  $("#model").value = chat.model;
  $("#model-field").hidden = names.length < 2;
  $("#model-name").textContent = names.length < 2 ? chat.model : "";
  $("#key-form").hidden = true;
}

// ── what is kept, and what the user does ─────────────────────────────────────────────────────────────────────────

let keeping = 0;

function keep() {
  clearTimeout(keeping);
  keeping = 0;
  if (!save(chat)) say("This chat is too long to outlast a reload.", true);
}

function keepSoon() {
  keeping ||= setTimeout(keep, 500);
}

function useSeed(seed) {
  chat.settings.seed = String(seed);
  $("#settings").open = true;
  $("[name=seed]").value = seed;
  $("[name=seed]").focus();
  keep();
}

async function showCode(kind) {
  $("#code-title").textContent = kind === "python" ? "Python" : "curl";
  try {
    const last = chat.turns.at(-1);
    const { body, begun } = last?.role === "assistant" ? await requestOf(chat, last) : { body: bodyOfNow(), begun: "" };
    const base = new URL("v1", document.baseURI).href;
    $("#code-text").value = (kind === "python" ? asPython : asCurl)(base, body, hasKey(), begun);
  } catch (error) { // the ids of a conversation are the server's to tell
    $("#code-text").value = error.message;
  }
  $("#copy").textContent = "Copy";
  $("#code").showModal();
}

// What would be asked now.
function bodyOfNow() {
  const messages = [...messagesOf(chat), { role: "user", content: $("#prompt").value || "Hi" }];
  return { model: chat.model, messages, ...fieldsOf(chat.settings) };
}

async function copy() {
  try {
    await navigator.clipboard.writeText($("#code-text").value);
    $("#copy").textContent = "Copied";
  } catch { // not allowed, or a page without TLS
    $("#code-text").select();
    $("#copy").textContent = document.execCommand("copy") ? "Copied" : "Selected: copy it";
  }
}

function listen() {
  $("#compose").addEventListener("submit", send);
  $("#prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  $("#stop").addEventListener("click", async () => {
    await stopped();
    $("#prompt").focus();
  });
  $("#fresh").addEventListener("click", async () => {
    await stopped();
    chat.turns = [];
    keep();
    render();
    $("#prompt").focus();
  });
  $("#retry").addEventListener("click", () => wake());
  $("#model").addEventListener("change", () => {
    chat.model = $("#model").value;
    forgetEngine();
    keep();
    wake();
  });
  $("#key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey($("#key").value.trim());
    $("#key").value = "";
    $("#key-form").hidden = true;
    wake();
  });
  for (const field of $("#settings-form").elements) {
    field.value = chat.settings[field.name] ?? "";
    field.addEventListener("input", () => {
      chat.settings[field.name] = field.value;
      keepSoon();
    });
  }
  $("#settings-form").addEventListener("submit", (event) => event.preventDefault());
  for (const each of document.querySelectorAll("[data-code]")) {
    each.addEventListener("click", () => showCode(each.dataset.code));
  }
  $("#copy").addEventListener("click", copy);
  $("#close").addEventListener("click", () => $("#code").close());
  addEventListener("pagehide", keep);
  listenToTokens();
}

function listenToTokens() {
  const turns = $("#turns");
  const token = (event) => event.target.closest(".tokens .token");
  turns.addEventListener("pointerover", (event) => {
    if (token(event) && event.pointerType === "mouse") alternatives.hover(token(event));
  });
  turns.addEventListener("pointerout", (event) => token(event) && alternatives.leave());
  turns.addEventListener("click", (event) => token(event) && alternatives.open(token(event)));
  turns.addEventListener("keydown", (event) => {
    moveBetweenTokens(event);
    if (!token(event) || (event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    alternatives.open(token(event));
  });
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest("#alternatives, .tokens .token")) alternatives.close();
  });
}

// A reload breaks off what is written.
for (const turn of chat.turns) {
  for (const branch of turn.branches ?? []) branch.end ||= "stopped";
}
if (matchMedia("(max-width: 50rem)").matches) $("#settings").open = false;
listen();
render();
watch();
