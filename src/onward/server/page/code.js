// A request as a program of one's own: Python with OpenAI's client, and curl. JSON's texts and numbers are Python's, too.

const OURS = ["top_k", "min_p"]; // fields that OpenAI's client does not name

// base: the server's address with /v1. wantsKey: whether it asks for an API key, which is then read from the environment.
export function asPython(base, body, wantsKey) {
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
    "stream = client.chat.completions.create(",
    ...fields,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
    "",
  ].join("\n");
}

export function asCurl(base, body, wantsKey) {
  const json = JSON.stringify({ ...body, stream: true }, null, 2).replaceAll("'", "'\\''");
  const key = wantsKey ? '-H "Authorization: Bearer $ONWARD_API_KEY" \\\n  ' : "";
  return `curl -N ${base}/chat/completions \\\n  -H 'Content-Type: application/json' \\\n  ${key}-d '${json}'\n`;
}

function literal(value) {
  return JSON.stringify(value, null, 4).replaceAll("\n", "\n    ");
}
