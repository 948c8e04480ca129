// The dialog that shows the last request of a chat as a program.

import { hasKey } from "./api.js";
import { fieldsOf, messagesOf, promptOf, requestOf } from "./chat.js";
import { asCurl, asPython } from "./code.js";

const $ = (selector) => document.querySelector(selector);
const EXAMPLE = "Tell me a story about a fox.";

// kind: "python" or "curl".
export async function showCode(chat, kind) {
  $("#code-title").textContent = kind === "python" ? "This request in Python" : "This request with curl";
  try {
    const last = chat.turns.at(-1);
    const { body, begun } = last?.role === "assistant" ? await requestOf(chat, last) : { body: next(chat), begun: "" };
    const base = new URL("v1", document.baseURI).href;
    $("#code-text").value = (kind === "python" ? asPython : asCurl)(base, body, hasKey(), begun);
  } catch (error) { // only the server knows the ids of a conversation
    $("#code-text").value = error.message;
  }
  $("#code-text").setSelectionRange(0, 0);
  $("#copy").textContent = "Copy";
  $("#code").showModal();
}

// The request that the message box would send.
function next(chat) {
  const messages = [...messagesOf(chat), { role: "user", content: $("#prompt").value || EXAMPLE }];
  return { model: chat.model, ...promptOf(chat.model, messages), ...fieldsOf(chat.settings) };
}

async function copy() {
  try {
    await navigator.clipboard.writeText($("#code-text").value);
    $("#copy").textContent = "Copied";
  } catch { // not allowed, or a page without TLS
    $("#code-text").select();
    $("#copy").textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C";
  }
}

$("#copy").addEventListener("click", copy);
$("#close").addEventListener("click", () => $("#code").close());
