// The conversation: its turns, the branches of each answer, and how an answer is asked for. It knows nothing of the page.
//
// turns: {role: "user", content} and {role: "assistant", branches, at}.
// A branch: {tokens, content, end, seed, usage, model, settings, later}. `later` has the turns that followed it when another
// branch was chosen. end: "" while it is written, "stop", "length", "stopped" (by the user), "away" (the server went) or
// the message of a refusal.
// ends: ids that have ended answers.
// A token: {id, text, logprob, top: [{id, text, logprob}], mark}. mark: "", "picked" (by the user) or "drafted".

import { post, stream } from "./api.js";

const KEPT = "onward.chat";
const ALTERNATIVES = 6;
export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

export function load() {
  const fresh = { model: "", settings: {}, turns: [], ends: [] };
  try {
    return { ...fresh, ...JSON.parse(sessionStorage.getItem(KEPT) ?? "{}") };
  } catch {
    return fresh;
  }
}

// Keep the chat for a reload. False: it is larger than browsers keep.
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

// The turns up to the one numbered `to` as messages.
export function messagesOf(chat, to = chat.turns.length, system = chat.settings.system) {
  const said = chat.turns.slice(0, to).map((turn) =>
    turn.role === "user" ? { role: "user", content: turn.content } : { role: "assistant", content: branchOf(turn).content });
  return system ? [{ role: "system", content: system }, ...said] : said;
}

// The settings that are given, as fields of a body.
export function fieldsOf(settings) {
  const given = NUMBERS.filter((name) => settings[name] !== undefined && settings[name] !== "");
  return Object.fromEntries(given.map((name) => [name, Number(settings[name])]));
}

// A new answer at the end, empty.
export function answer(chat) {
  const branch = newBranch(chat.model, chat.settings);
  chat.turns.push({ role: "assistant", branches: [branch], at: 0 });
  return branch;
}

// Another branch of a turn's answer: its tokens before the one numbered `at`, then `token` instead of that.
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

// Turn to another branch. What follows in the chat goes with the one it followed.
export function show(chat, turn, at) {
  branchOf(turn).later = chat.turns.splice(chat.turns.indexOf(turn) + 1);
  turn.at = at;
  chat.turns.push(...branchOf(turn).later);
  branchOf(turn).later = [];
}

// Another branch of a turn's answer from its beginning, with the settings of now.
export function again(chat, turn) {
  turn.branches.push(newBranch(chat.model, chat.settings));
  show(chat, turn, turn.branches.length - 1);
}

// Whether the answer could be longer: it was broken off, or has as many tokens as it was to have.
export function canGoOn(branch) {
  return branch.end !== "" && branch.end !== "stop" && (branch.end !== "length" || Boolean(branch.settings.max_tokens));
}

// Let an answer that has as many tokens as it was to have become longer by as many.
export function extend(branch) {
  const more = Number(branch.settings.max_tokens);
  if (branch.end === "length") branch.settings.max_tokens = branch.tokens.length + more;
}

// Write a turn's answer on from where it is: one that is empty as a chat, any other as a text of ids. `changed()` after
// each chunk. Throws what the server throws.
export async function write(chat, turn, signal, changed) {
  const branch = branchOf(turn);
  const before = messagesOf(chat, chat.turns.indexOf(turn), branch.settings.system);
  const fields = { model: branch.model, ...fieldsOf(branch.settings), return_token_ids: true };
  if (branch.seed !== null) fields.seed = branch.seed; // the same draws as if it had not been interrupted
  branch.end = "";
  if (!branch.tokens.length) {
    const body = { ...fields, messages: before, logprobs: true, top_logprobs: ALTERNATIVES };
    await follow(chat, branch, stream("v1/chat/completions", body, signal), changed);
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

// A conversation as ids, and those of an answer that has begun.
async function idsOf(model, messages, tokens, signal) {
  const prompt = await post("tokenize", { model, messages }, signal);
  return [...prompt.tokens, ...tokens.map((token) => token.id)];
}

// What a turn's answer was asked for with, for a program of one's own: {body, begun}. Where the user has chosen tokens, the
// answer up to the last of them is a part of the prompt, and `begun` is its text.
export async function requestOf(chat, turn) {
  const branch = branchOf(turn);
  const messages = messagesOf(chat, chat.turns.indexOf(turn), branch.settings.system);
  const fields = fieldsOf(branch.settings);
  if (branch.seed != null) fields.seed = branch.seed;
  const begun = branch.tokens.slice(0, branch.tokens.findLastIndex((token) => token.mark === "picked") + 1);
  if (!begun.length) return { body: { model: branch.model, messages, ...fields }, begun: "" };
  if (fields.max_tokens !== undefined) fields.max_tokens = Math.max(0, fields.max_tokens - begun.length);
  const prompt = await idsOf(branch.model, messages, begun);
  return { body: { model: branch.model, prompt, ...fields }, begun: textOf(begun) };
}

async function follow(chat, branch, events, changed) {
  const marks = []; // of tokens whose texts have not come: one may end inside a character
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

// What of these tokens goes back to the model with the next message: not its reasoning.
function textOf(tokens) {
  const text = tokens.map((token) => token.text).join("");
  return text.replace(/^\s*<think>[\s\S]*?<\/think>\s*/, "");
}
