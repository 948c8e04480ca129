// The page: it shows the chat, and reacts to the user and the server.

import { Away, get, hasKey, setKey } from "./api.js";
import {
  again, answer, branchOf, canGoOn, extend, fork, hasTemplate, load, problemOf, save, setModels, show, write,
} from "./chat.js";
import { showCode } from "./dialog.js";
import { forgetEngine, showEngine } from "./engine.js";
import { say } from "./say.js";
import { following, toEnd } from "./scroll.js";
import { Alternatives, moveBetweenTokens, tokenElement } from "./tokens.js";

const $ = (selector) => document.querySelector(selector);
const chat = load();
const elements = new WeakMap(); // turn -> its element
const EXAMPLES = {
  chat: ["Tell me a story about a fox.", "Write a story about a mouse.", "What can you do?"],
  text: ["Once upon a time", "The fox looked out of the window and"],
};
let writing = null; // {turn, stop, done}: the answer that is written
let wake = () => {}; // ends the wait for the next look at the server
let models = []; // the entries of /v1/models

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
  const [shown, hidden] = writing ? [$("#stop"), $("#send")] : [$("#send"), $("#stop")];
  const hadFocus = document.activeElement === hidden;
  shown.hidden = false;
  hidden.hidden = true;
  if (hadFocus) shown.focus();
}

// What the page says about the chosen model: its name, its defaults, and how to begin.
function renderModel() {
  const model = modelOfNow();
  const isChat = hasTemplate(model.id);
  document.title = `Onward · ${model.id}`;
  $("#empty-title").textContent = isChat ? `Chat with ${model.id}` : `Let ${model.id} continue a text`;
  const examples = EXAMPLES[isChat ? "chat" : "text"];
  $("#examples").replaceChildren(...examples.map((text) => button(text, () => areSettingsValid() && ask(text))));
  const { max_new_tokens: length, ...options } = model.default_options ?? {};
  const off = { temperature: 0, top_p: 1, top_k: 0, min_p: 0 };
  for (const [name, value] of Object.entries(off)) {
    const note = options[name] !== value ? "" : name === "temperature" ? " (greedy)" : " (off)";
    // A model on demand has no defaults until it is loaded.
    $(`[name=${name}]`).placeholder = name in options ? `${options[name]}${note}` : "the model's default";
  }
  $("[name=max_tokens]").placeholder = length ?? "rest of context";
}

function modelOfNow() {
  return models.find((model) => model.id === chat.model);
}

function showPanel(isShown) {
  document.body.classList.toggle("panel-open", isShown);
  $("#panel-button").setAttribute("aria-expanded", isShown);
  $("#panel-button").textContent = isShown ? "Chat" : "Settings";
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
  element.tabIndex = -1;
  const tokens = made("p", "tokens");
  tokens.setAttribute("role", "group");
  tokens.setAttribute("aria-label", "Tokens. Arrow keys move between them, Enter shows alternatives.");
  element.append(tokens, made("div", "facts note"));
  renderAnswer(turn);
  return element;
}

// Show the new tokens of an answer.
function renderAnswer(turn) {
  const branch = branchOf(turn);
  const tokens = elements.get(turn).querySelector(".tokens");
  for (let at = tokens.childElementCount; at < branch.tokens.length; at++) tokens.append(tokenElement(branch.tokens[at], at));
  elements.get(turn).querySelector(".facts").replaceChildren(...facts(turn, branch));
}

function facts(turn, branch) {
  if (!branch.end) return [made("span", "", branch.tokens.length ? "…" : "Processing the prompt …")];
  const shown = [];
  if (turn.branches.length > 1) shown.push(...branchButtons(turn));
  shown.push(made("span", "", branch.tokens.length === 1 ? "1 token" : `${branch.tokens.length} tokens`));
  const { usage } = branch;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) shown.push(made("span", "", `${cached} of ${usage.prompt_tokens} prompt tokens cached`));
  const drafts = usage?.completion_tokens_details;
  const all = drafts ? drafts.accepted_prediction_tokens + drafts.rejected_prediction_tokens : 0;
  if (all) {
    shown.push(made("span", "", `${drafts.accepted_prediction_tokens} of ${all} draft tokens accepted`));
  }
  const ends = { length: "reached the maximum length", stopped: "stopped by you", away: "interrupted" };
  if (ends[branch.end]) shown.push(made("span", "", ends[branch.end]));
  if (canGoOn(branch)) shown.push(button("Continue", () => goOn(turn), "Continue this answer"));
  const retry = branch.tokens.length ? "Regenerate" : "Try again";
  shown.push(button(retry, () => rewrite(turn), `${retry}: ask for this answer again`));
  if (branch.seed !== null) {
    shown.push(button(`Seed ${branch.seed}`, () => useSeed(branch.seed), `Seed ${branch.seed}: use it for the next answers`));
  }
  if (problemOf(branch)) return [problem(problemOf(branch)), ...(branch.tokens.length ? shown : shown.slice(-1))];
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
  const back = button("‹", to(turn.at - 1), "Previous branch");
  const forth = button("›", to(turn.at + 1), "Next branch");
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

// ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

// What to do about an error, by its code.
const ADVICE = {
  context_length_exceeded: ". Start a new chat, or send a shorter message.",
  invalid_api_key: " Enter the key above, and try again.",
};

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
    following(() => renderAnswer(turn));
    say(branch.content.slice(said));
    said = branch.content.length;
    keepSoon();
  };
  following(() => renderAnswer(turn));
  renderControls();
  try {
    await write(chat, turn, signal, changed);
  } catch (error) {
    if (error.name === "AbortError") branch.end = "stopped";
    else if (error instanceof Away) branch.end = "away";
    else branch.end = `${error.message}${ADVICE[error.code] ?? ""}`;
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
  if (!content.trim() || !chat.model || writing || !areSettingsValid()) return;
  $("#prompt").value = "";
  await ask(content);
}

async function ask(content) {
  chat.turns.push({ role: "user", content });
  answer(chat);
  const hadFocus = $("#examples").contains(document.activeElement);
  render();
  toEnd();
  if (hadFocus) elements.get(chat.turns.at(-1)).focus({ preventScroll: true }); // the example is hidden now
  await run(chat.turns.at(-1));
}

function areSettingsValid() {
  const form = $("#settings-form");
  if (form.checkValidity()) return true;
  showPanel(true); // the browser shows its message at the field
  return form.reportValidity();
}

async function goOn(turn) {
  await stopped();
  elements.get(turn).focus({ preventScroll: true }); // the button goes away
  extend(branchOf(turn));
  await run(turn);
}

async function rewrite(turn) {
  if (!areSettingsValid()) return;
  await stopped();
  again(chat, turn);
  render();
  elements.get(turn).focus({ preventScroll: true });
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

let isStale = true; // whether the models may be others: the server was away
let failures = 0;

function lost(error) {
  const text = `${error.message} The page keeps trying, and then continues an interrupted answer.`;
  if ($("#trouble").hidden || $("#trouble-text").textContent !== text) $("#trouble-text").textContent = text;
  $("#trouble").hidden = false;
}

function found() {
  failures = 0;
  if ($("#trouble").hidden) return;
  $("#trouble").hidden = true;
  say("The server answers again.", true);
}

function askForKey() {
  $("#key-form").hidden = false;
  $("#key-problem").textContent = hasKey() ? "This key is wrong: check it and try again." : "";
  $("#key").focus();
}

// Poll the server: every second while it answers, ever more rarely while it does not.
async function watch() {
  for (;;) {
    let seconds = document.hidden ? 10 : 1;
    try {
      if (isStale) showModels((await get("v1/models")).data);
      const stats = await get("stats");
      found();
      const served = modelOfNow().parent ?? chat.model;
      if (stats[served]) showEngine(stats[served]);
      if (stats[served] && modelOfNow().status !== "loaded") showModels((await get("v1/models")).data);
      const last = chat.turns.at(-1);
      if (!writing && last?.role === "assistant" && branchOf(last).end === "away") run(last);
    } catch (error) {
      isStale = true;
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

function showModels(entries) {
  models = entries;
  isStale = false;
  setModels(entries);
  const names = entries.map((model) => model.id);
  if (!names.includes(chat.model)) [chat.model] = names;
  $("#model").replaceChildren(...names.map((name) => made("option", "", name)));
  $("#model").value = chat.model;
  $("#model-field").hidden = names.length < 2;
  $("#model-name").textContent = names.length < 2 ? chat.model : "";
  $("#key-form").hidden = true;
  renderModel();
}

// ── the user's actions, and the chat in the browser's storage ─────────────────────────────────────────────────────────────────────────

let keeping = 0;

function keep() {
  clearTimeout(keeping);
  keeping = 0;
  if (!save(chat)) say("This chat is too long to survive a reload of the page.", true);
}

function keepSoon() {
  keeping ||= setTimeout(keep, 500);
}

function useSeed(seed) {
  chat.settings.seed = String(seed);
  showPanel(true);
  $("[name=seed]").value = seed;
  $("[name=seed]").focus();
  keep();
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
    showPanel(false);
    following(render);
    $("#prompt").focus();
  });
  $("#retry").addEventListener("click", () => wake());
  $("#model").addEventListener("change", () => {
    chat.model = $("#model").value;
    renderModel();
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
    each.addEventListener("click", () => showCode(chat, each.dataset.code));
  }
  $("#panel-button").addEventListener("click", () => showPanel(!document.body.classList.contains("panel-open")));
  $("#latest").addEventListener("click", () => {
    toEnd();
    $("#prompt").focus();
  });
  document.addEventListener("scroll", () => alternatives.follow(), true); // of any element
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

// A reload stops an answer that is being written.
for (const turn of chat.turns) {
  for (const branch of turn.branches ?? []) branch.end ||= "stopped";
}
listen();
render();
toEnd();
watch();
