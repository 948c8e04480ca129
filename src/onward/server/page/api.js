// Requests to the server. Addresses are relative, so that a proxy can serve the page under any path.

const KEY = "onward.key";

// The server refuses a request. code: of its error.
export class Refusal extends Error {
  constructor(message, status, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The server does not answer, or takes no requests now. seconds: until the next try, from its Retry-After.
export class Away extends Error {
  constructor(message, seconds = 0) {
    super(message);
    this.seconds = seconds;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return Boolean(sessionStorage.getItem(KEY));
}

export async function get(path) {
  return (await ask(path, { signal: AbortSignal.timeout(10_000) })).json();
}

export async function post(path, body, signal) {
  return (await sent(path, body, signal)).json();
}

// The events of a stream, as objects.
export async function* stream(path, body, signal) {
  const response = await sent(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(away);
      if (done) throw new Away("The connection to the server broke off.");
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const line = frame.split("\n").find((each) => each.startsWith("data: "));
        if (!line) continue; // a comment, which keeps the connection alive
        const data = line.slice("data: ".length);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw failed(event.error);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function sent(path, body, signal) {
  return ask(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal });
}

async function ask(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch(away);
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const message = body.error?.message ?? `The server answered with HTTP status ${response.status}.`;
  if ([429, 502, 503, 504].includes(response.status)) throw new Away(message, Number(response.headers.get("retry-after")) || 0);
  throw new Refusal(message, response.status, body.error?.code);
}

function failed(error) {
  return error.code === "engine_unavailable" ? new Away(error.message) : new Refusal(error.message, 500, error.code);
}

function away(error) {
  if (error.name === "AbortError") throw error;
  throw new Away("The server does not answer: check that it is running.");
}
