// The conversation: its turns, the branches of each answer, and the requests for answers. It does not touch the page.
//
// turns: {role: "user", content} and {role: "assistant", branches, at}.
// A branch: {tokens, content, end, seed, usage, model, settings, later}. `later` has the turns that followed it when another
// branch was chosen. end: "" while it is written, "stop", "length", "stopped" (by the user), "away" (the server went away)
// or the message of an error.
// ends: ids that have ended answers.
// A token: {id, text, logprob, top: [{id, text, logprob}], mark}. mark: "", "picked" (by the user) or "drafted".

import { post, stream } from "./api.js";

const KEPT = "onward.chat";
const ALTERNATIVES = 6;
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const ENDS = ["", "stop", "length", "stopped", "away"];
const plain = new Set(); // models without a chat template: they continue a text

export function load() {
  const fresh = { model: "", settings: {}, turns: [], ends: [] };
  try {
    return { ...fresh, ...JSON.parse(sessionStorage.getItem(KEPT) ?? "{}") };
  } catch {
    return fresh;
  }
}

// Store the chat for a reload. False: it is too large for the browser's storage.
export function save(chat) {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(chat));
    return true;
  } catch {
    return false;
  }
}

export function branchOf(turn) {
  return turn.branches[turn.at];
}

// models: the entries of /v1/models.
export function setModels(models) {
  plain.clear();
  // A model that is not loaded yet has no such entry: it probably has a template.
  for (const model of models) if (model.chat_template === false) plain.add(model.id);
}

export function hasTemplate(model) {
  return !plain.has(model);
}

// The message of the error that ended a branch.
export function problemOf(branch) {
  return ENDS.includes(branch.end) ? "" : branch.end;
}

// The turns up to the one numbered `to` as messages, without the ones that the server refused to answer.
export function messagesOf(chat, to = chat.turns.length, system = chat.settings.system) {
  const isRefused = (turn) => turn?.role === "assistant" && problemOf(branchOf(turn)) && !branchOf(turn).tokens.length;
  const turns = chat.turns.slice(0, to);
  const said = turns.filter((turn, at) => !isRefused(turn) && !isRefused(turns[at + 1])).map((turn) =>
    turn.role === "user" ? { role: "user", content: turn.content } : { role: "assistant", content: branchOf(turn).content });
  return system ? [{ role: "system", content: system }, ...said] : said;
}

// Messages as the field of a body: a chat, or a text that a model without a chat template continues.
export function promptOf(model, messages) {
  if (hasTemplate(model)) return { messages };
  return { prompt: messages.map((message) => message.content).join("") };
}

// The settings that are not empty, as fields of a body.
export function fieldsOf(settings) {
  const given = NUMBERS.filter((name) => settings[name] !== undefined && settings[name] !== "");
  return Object.fromEntries(given.map((name) => [name, Number(settings[name])]));
}

// Add an empty answer at the end.
export function answer(chat) {
  const branch = newBranch(chat.model, chat.settings);
  chat.turns.push({ role: "assistant", branches: [branch], at: 0 });
  return branch;
}

// Add a branch to a turn's answer: its tokens before position `at`, and then `token`.
export function fork(chat, turn, at, token) {
  const old = branchOf(turn);
  const branch = newBranch(old.model, { ...old.settings });
  const { top } = old.tokens[at];
  branch.seed = old.seed;
  branch.tokens = [...old.tokens.slice(0, at), { ...token, top, mark: "picked" }];
  branch.content = textOf(branch.tokens);
  if (chat.ends.includes(token.id)) branch.end = "stop";
  turn.branches.push(branch);
  show(chat, turn, turn.branches.length - 1);
  return branch;
}

// Show another branch. Later turns belong to the branch that they followed.
export function show(chat, turn, at) {
  branchOf(turn).later = chat.turns.splice(chat.turns.indexOf(turn) + 1);
  turn.at = at;
  chat.turns.push(...branchOf(turn).later);
  branchOf(turn).later = [];
}

// Another branch of a turn's answer from its beginning, with the current settings; it replaces an empty one.
export function again(chat, turn) {
  const branch = newBranch(chat.model, chat.settings);
  if (!branchOf(turn).tokens.length) {
    turn.branches[turn.at] = branch;
    return;
  }
  turn.branches.push(branch);
  show(chat, turn, turn.branches.length - 1);
}

// Whether the answer could be longer: it was broken off, or reached the limit of its settings.
export function canGoOn(branch) {
  if (branch.end === "" || branch.end === "stop" || !branch.tokens.length) return false;
  return branch.end !== "length" || Boolean(branch.settings.max_tokens);
}

// Let an answer that reached its maximum length grow by the same length again.
export function extend(branch) {
  const more = Number(branch.settings.max_tokens);
  if (branch.end === "length") branch.settings.max_tokens = branch.tokens.length + more;
}

// Continue a turn's answer: an empty one as a chat, any other from its token ids. Calls `changed()` after each chunk.
// Throws the errors of api.js.
export async function write(chat, turn, signal, changed) {
  const branch = branchOf(turn);
  const before = messagesOf(chat, chat.turns.indexOf(turn), branch.settings.system);
  const fields = { model: branch.model, ...fieldsOf(branch.settings), return_token_ids: true };
  if (branch.seed !== null) fields.seed = branch.seed; // the same draws as if it had not been interrupted
  branch.end = "";
  if (!branch.tokens.length) {
    const isChat = hasTemplate(branch.model);
    const logprobs = isChat ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES };
    const body = { ...fields, ...promptOf(branch.model, before), ...logprobs };
    await follow(chat, branch, stream(isChat ? "v1/chat/completions" : "v1/completions", body, signal), changed);
    return;
  }
  branch.content = textOf(branch.tokens);
  if (fields.max_tokens !== undefined) fields.max_tokens -= branch.tokens.length;
  if (fields.max_tokens <= 0) {
    branch.end = "length";
    return;
  }
  const prompt = await idsOf(branch.model, before, branch.tokens, signal);
  const body = { ...fields, prompt, logprobs: ALTERNATIVES };
  await follow(chat, branch, stream("v1/completions", body, signal), changed);
}

// The ids of a conversation and of the beginning of its answer.
async function idsOf(model, messages, tokens, signal) {
  const prompt = await post("tokenize", { model, ...promptOf(model, messages) }, signal);
  return [...prompt.tokens, ...tokens.map((token) => token.id)];
}

// The request for a turn's answer, to show as a program: {body, begun}. If the user has picked tokens, the answer up to
// the last of them is part of the prompt, and `begun` is its text.
export async function requestOf(chat, turn) {
  const branch = branchOf(turn);
  const messages = messagesOf(chat, chat.turns.indexOf(turn), branch.settings.system);
  const fields = fieldsOf(branch.settings);
  if (branch.seed != null) fields.seed = branch.seed;
  const begun = branch.tokens.slice(0, branch.tokens.findLastIndex((token) => token.mark === "picked") + 1);
  if (!begun.length) return { body: { model: branch.model, ...promptOf(branch.model, messages), ...fields }, begun: "" };
  if (fields.max_tokens !== undefined) fields.max_tokens = Math.max(0, fields.max_tokens - begun.length);
  const prompt = await idsOf(branch.model, messages, begun);
  return { body: { model: branch.model, prompt, ...fields }, begun: textOf(begun) };
}

async function follow(chat, branch, events, changed) {
  const marks = []; // of tokens whose text is still missing, since a token may end inside a character
  for await (const event of events) {
    branch.seed = event.seed ?? branch.seed;
    branch.usage = event.usage ?? branch.usage;
    for (const choice of event.choices) {
      branch.content += choice.delta?.content ?? choice.text ?? "";
      marks.push(...(choice.token_ids ?? []).map((_, at) => (choice.drafted?.[at] ? "drafted" : "")));
      for (const entry of choice.logprobs?.content ?? []) {
        branch.tokens.push({ ...tokenOf(entry), top: entry.top_logprobs.map(tokenOf), mark: marks.shift() ?? "" });
      }
      branch.end = choice.finish_reason ?? branch.end;
    }
    changed();
  }
  const last = branch.tokens.at(-1);
  if (branch.end === "stop" && last?.text === "" && !chat.ends.includes(last.id)) chat.ends.push(last.id);
}

function newBranch(model, settings) {
  return { tokens: [], content: "", end: "", seed: null, usage: null, model, settings: { ...settings }, later: [] };
}

function tokenOf({ id, token, logprob }) {
  return { id, text: token, logprob: Math.round(logprob * 1e4) / 1e4 };
}

// The text of tokens as the next request has it: without reasoning.
function textOf(tokens) {
  const text = tokens.map((token) => token.text).join("");
  return text.replace(/^\s*<think>[\s\S]*?<\/think>\s*/, "");
}
