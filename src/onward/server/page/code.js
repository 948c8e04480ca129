// A request as a program: Python with OpenAI's client, or curl. JSON strings and numbers are valid Python, too.

const OURS = ["top_k", "min_p"]; // fields that OpenAI's client takes in extra_body only

// base: the server's address with /v1. body: of a chat, or of a completion that continues ids. wantsKey: whether the server
// requires an API key; the program reads it from the environment. begun: the answer's text in the prompt.
export function asPython(base, body, wantsKey, begun = "") {
  const isChat = "messages" in body;
  const given = Object.entries(body).filter(([name]) => !OURS.includes(name));
  const ours = Object.fromEntries(Object.entries(body).filter(([name]) => OURS.includes(name)));
  const fields = given.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(ours).length) fields.push(`    extra_body=${literal(ours)},`);
  const key = wantsKey ? 'os.environ["ONWARD_API_KEY"]' : '"none"';
  return [
    ...(wantsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(base)}, api_key=${key})`,
    `stream = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...fields,
    "    stream=True,",
    ")",
    ...(begun ? [`print(${literal(begun)}, end="")`] : []),
    "for chunk in stream:",
    `    print(chunk.choices[0].${isChat ? 'delta.content or ""' : "text"}, end="", flush=True)`,
    "",
  ].join("\n");
}

export function asCurl(base, body, wantsKey) {
  const json = onLines({ ...body, stream: true }, 2).replaceAll("'", "'\\''");
  const path = "messages" in body ? "chat/completions" : "completions";
  const key = wantsKey ? '-H "Authorization: Bearer $ONWARD_API_KEY" \\\n  ' : "";
  return `curl -N ${base}/${path} \\\n  -H 'Content-Type: application/json' \\\n  ${key}-d '${json}'\n`;
}

function literal(value) {
  return onLines(value, 4).replaceAll("\n", "\n    ");
}

// Indented JSON, with ids on one line.
function onLines(value, indent) {
  const beside = (ids) => ids.replace(/\s+/g, " ").replace("[ ", "[").replace(" ]", "]");
  return JSON.stringify(value, null, indent).replace(/\[\n[\s\d,]+\]/g, beside);
}
