// The page at /docs: /openapi.json as a list of endpoints, with the types and limits of their fields.

import { say } from "./say.js";

const at = (id) => document.getElementById(id);
// Examples of required fields, in the smallest request.
const EXAMPLES = {
  messages: [{ role: "user", content: "Hello!" }], prompt: "Once upon a time", input: "Hello!", tokens: [1, 2, 3], max_tokens: 100,
};
const ENDLESS = Number.MAX_SAFE_INTEGER; // limits of a type are none to a reader

let schemas = {};

function made(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const code = (text) => made("code", { textContent: text });
const resolved = (schema) => (schema?.$ref ? schemas[schema.$ref.split("/").pop()] ?? {} : schema ?? {});

// The alternatives of a schema without null, which means the same as leaving a field out.
function alternatives(schema) {
  const whole = resolved(schema);
  const options = whole.anyOf ?? whole.oneOf;
  return options ? options.flatMap(alternatives) : whole.type === "null" ? [] : [whole];
}

function limits(schema) {
  const few = (number) => number !== undefined && Math.abs(number) < ENDLESS;
  const { minimum, maximum, exclusiveMinimum, exclusiveMaximum, minLength, maxLength, minItems, maxItems, maxProperties } = schema;
  const found = [];
  if (few(minimum) && few(maximum)) found.push(`${minimum} to ${maximum}`);
  else if (few(minimum)) found.push(`at least ${minimum}`);
  if (few(exclusiveMinimum)) found.push(`above ${exclusiveMinimum}`);
  if (few(maximum) && !few(minimum)) found.push(`at most ${maximum.toLocaleString("en")}`);
  if (few(exclusiveMaximum)) found.push(`below ${exclusiveMaximum}`);
  if (minLength) found.push(`at least ${minLength} characters`);
  if (few(maxLength)) found.push(`at most ${maxLength.toLocaleString("en")} characters`);
  if (minItems) found.push(`at least ${minItems}`);
  if (few(maxItems)) found.push(`at most ${maxItems.toLocaleString("en")}`);
  if (few(maxProperties)) found.push(`at most ${maxProperties.toLocaleString("en")} keys`);
  return found.length ? ` (${found.join(", ")})` : "";
}

// A type in words, as nodes.
function kind(schema) {
  const each = alternatives(schema).map((one) => {
    if (one.const !== undefined) return [code(JSON.stringify(one.const))];
    if (one.enum) {
      const values = one.enum.filter((value) => value !== null);
      return values.flatMap((value, index) => [index ? " or " : "", code(JSON.stringify(value))]);
    }
    if (one.type === "array") {
      const inner = one.items ? kind(one.items) : [];
      return [...(inner.length ? ["array of ", ...inner] : ["array"]), limits(one)];
    }
    return one.type ? [`${one.type}${limits(one)}`] : [];
  }).filter((nodes) => nodes.length);
  // Arrays of one thing, and the thing: each kind once.
  const shown = new Map(each.map((nodes) => [nodes.map((node) => node.textContent ?? node).join(""), nodes]));
  return [...shown.values()].flatMap((nodes, index) => [index ? " or " : "", ...nodes]);
}

// The objects that a value may contain: itself, or the items of an array.
function objects(schema) {
  return alternatives(schema).flatMap((one) => {
    if (one.type === "array" && one.items) return objects(one.items);
    return one.properties ? [one] : [];
  });
}

function field(name, schema, required, depth) {
  const whole = resolved(schema);
  const parts = objects(schema);
  const words = kind(schema);
  const detail = depth < 6 ? parts.map((one) => {
    const label = parts.length > 1 ? variant(one) : "Its fields";
    return made("details", {}, made("summary", { textContent: label }), fields(one, depth + 1));
  }) : [];
  const description = whole.description ?? schema.description;
  const entry = made("div", { className: "field" },
    made("dt", {}, made("span", { className: "name", textContent: name }),
      required ? made("span", { className: "required", textContent: "required" }) : null),
    made("dd", {}, description ? made("p", { textContent: description.replaceAll("\n", " ") }) : null,
      words.length ? made("p", { className: "kind" }, ...words) : null, ...detail));
  entry.dataset.name = name.toLowerCase();
  return entry;
}

// What tells an object of several apart: its constants.
function variant(schema) {
  const constants = Object.entries(schema.properties).filter(([, one]) => resolved(one).const !== undefined);
  if (constants.length) return constants.map(([name, one]) => `${name} ${JSON.stringify(resolved(one).const)}`).join(", ");
  return schema.title ?? Object.keys(schema.properties).slice(0, 3).join(", ");
}

function fields(schema, depth = 0) {
  const required = new Set(schema.required ?? []);
  const entries = Object.entries(schema.properties ?? {});
  const ordered = [...entries.filter(([name]) => required.has(name)), ...entries.filter(([name]) => !required.has(name))];
  const groups = { used: [], label: [], none: [] };
  for (const [name, one] of ordered) {
    const said = one.description ?? "";
    const group = said.startsWith("Not supported") ? "none" : said.startsWith("A label") ? "label" : "used";
    groups[group].push(field(name, one, required.has(name), depth));
  }
  const list = made("dl", { className: "fields" }, ...groups.used);
  const folded = (entries, title) => entries.length
    ? made("details", {}, made("summary", { textContent: `${title} (${entries.length})` }), made("dl", { className: "fields" }, ...entries))
    : null;
  return made("div", {}, list, folded(groups.label, "Labels without effect"), folded(groups.none, "Known but not supported"));
}

function example(method, path, schema) {
  const url = new URL(`.${path}`, document.baseURI).href;
  const lines = [method === "post" ? `curl ${url}` : `curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${url}`];
  if (schema) {
    const needed = new Set(schema.required ?? []);
    if (!needed.size && schema.properties?.prompt) needed.add("prompt");
    const body = Object.fromEntries([...needed].map((name) => [name, EXAMPLES[name] ?? `a ${name}`]));
    if (schema.properties?.max_tokens) body.max_tokens = EXAMPLES.max_tokens;
    lines.push(`-H 'Content-Type: application/json'`, `-d '${JSON.stringify(body)}'`);
  }
  const text = lines.join(" \\\n  ");
  const copy = made("button", { type: "button", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    say("Copied", true);
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  return made("div", { className: "example" }, made("pre", { tabIndex: 0 }, code(text)), navigator.clipboard ? copy : null);
}

function statuses(responses) {
  const list = made("dl", { className: "statuses" });
  for (const [status, one] of Object.entries(responses).sort()) {
    const said = one.description === "Successful Response" ? "The response." : one.description;
    list.append(made("dt", {}, code(status)), made("dd", { textContent: said }));
  }
  return list;
}

function endpoint(path, method, operation, alias) {
  const id = `${method}${path.replace(/[^A-Za-z0-9]+/g, "-")}`;
  const content = operation.requestBody?.content?.["application/json"];
  const body = content ? resolved(content.schema) : null;
  const success = operation.responses?.["200"]?.content ?? {};
  const answer = resolved(success["application/json"]?.schema);
  const section = made("section", { id },
    made("h2", {}, made("span", { className: `method ${method}`, textContent: method.toUpperCase() }), made("a", { href: `#${id}` }, code(path))),
    made("p", { className: "summary", textContent: operation.summary ?? "" }),
    operation.description ? made("p", { className: "quiet", textContent: operation.description }) : null,
    alias ? made("p", { className: "summary quiet" }, "Also as ", code(alias), ".") : null,
    made("h3", { textContent: "Example" }), example(method, path, body));
  const parameters = operation.parameters ?? [];
  if (parameters.length) {
    const entries = parameters.map((one) => field(one.name, { ...one.schema, description: one.description }, one.required, 0));
    const place = parameters.every((one) => one.in === "header") ? "Headers" : "Parameters";
    section.append(made("h3", { textContent: place }), made("dl", { className: "fields" }, ...entries));
  }
  if (body?.properties) section.append(made("h3", { textContent: "Fields" }), fields(body));
  if (answer.properties) {
    const streams = "text/event-stream" in success ? ", or events with stream: true" : "";
    const label = made("summary", { textContent: `Fields of the response${streams}` });
    section.append(made("h3", { textContent: "Response" }), made("details", {}, label, fields(answer)));
  }
  if (operation.responses) section.append(made("h3", { textContent: "Status" }), statuses(operation.responses));
  section.dataset.name = `${path} ${operation.summary ?? ""}`.toLowerCase();
  const link = made("a", { href: `#${id}` }, made("span", { className: `method ${method}`, textContent: method.toUpperCase() }), made("span", { textContent: path }));
  return { section, link };
}

// Show the endpoints and fields whose names contain a text, with folded ones that do unfolded.
function find(endpoints) {
  const text = at("find").value.trim().toLowerCase();
  let count = 0;
  for (const { section, link } of endpoints) {
    const named = !text || section.dataset.name.includes(text);
    let found = 0;
    for (const entry of section.querySelectorAll(".field")) {
      const matches = Boolean(text) && entry.dataset.name.includes(text);
      entry.classList.toggle("found", matches);
      found += matches;
      if (!matches) continue;
      for (let outer = entry.closest("details"); outer; outer = outer.parentElement.closest("details")) outer.open = true;
    }
    const shows = (part) => named || part.matches(".found") || part.querySelector(".found") || part.parentElement.closest(".found");
    for (const part of section.querySelectorAll(".field, details, h3, .example, .statuses, .summary")) part.hidden = !shows(part);
    section.hidden = link.hidden = !named && !found;
    count += !section.hidden;
  }
  at("none").hidden = count > 0;
}

function follow(endpoints) {
  const links = new Map(endpoints.map(({ section, link }) => [section, link]));
  const seen = new Set();
  const watcher = new IntersectionObserver((changes) => {
    for (const { target, isIntersecting } of changes) seen[isIntersecting ? "add" : "delete"](target);
    const first = [...links.keys()].find((section) => seen.has(section));
    for (const [section, link] of links) {
      if (section === first) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-72px 0px -50% 0px" });
  for (const section of links.keys()) watcher.observe(section);
}

async function show() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`HTTP status ${response.status}`);
  const whole = await response.json();
  schemas = whole.components?.schemas ?? {};
  at("version").textContent = whole.info.version;
  at("base").textContent = new URL("./v1", document.baseURI).href;
  const endpoints = [];
  for (const [path, methods] of Object.entries(whole.paths)) {
    if (`/v1${path}` in whole.paths) continue; // an alias
    const alias = path.startsWith("/v1/") && path.slice(3) in whole.paths ? path.slice(3) : null;
    for (const [method, operation] of Object.entries(methods)) endpoints.push(endpoint(path, method, operation, alias));
  }
  at("index").replaceChildren(...endpoints.map(({ link }) => link));
  at("endpoints").append(...endpoints.map(({ section }) => section));
  at("find").addEventListener("input", () => find(endpoints));
  find(endpoints); // of what was typed meanwhile
  follow(endpoints);
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

show().catch((error) => {
  at("problem").textContent = `The document of the API cannot be read (${error.message}). Reload the page to try again.`;
  at("problem").hidden = false;
});
