// Tokens on the page: shades by probability, arrow keys between them, and the alternatives of one.

const LEAVING = 250; // ms for the pointer to get from a token to its alternatives

// The element of a token. `at`: its number in the answer.
export function tokenElement(token, at) {
  const element = document.createElement("span");
  element.className = `token ${shade(token.logprob)} ${token.mark}`;
  element.dataset.at = at;
  element.tabIndex = at ? -1 : 0; // arrow keys reach the others
  element.setAttribute("role", "button");
  element.setAttribute("aria-haspopup", "dialog");
  if (!token.text.trim()) element.setAttribute("aria-label", visible(token));
  element.setAttribute("aria-description", [percent(token.logprob), token.mark].filter(Boolean).join(", "));
  const blank = token.text.trim() ? token.text.match(/^\s*/)[0] : ""; // not shaded: lines break there
  const word = document.createElement("span");
  word.className = "word";
  word.textContent = token.text.slice(blank.length) || "◦";
  element.classList.toggle("mark", !token.text);
  element.append(blank, word);
  return element;
}

// Left, right, Home and End among the tokens of an answer.
export function moveBetweenTokens(event) {
  const from = event.target.closest(".tokens .token");
  if (!from) return;
  const all = [...from.parentElement.querySelectorAll(".token")];
  const at = all.indexOf(from);
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  if (!all[to]) return;
  from.tabIndex = -1;
  all[to].tabIndex = 0;
  all[to].focus();
}

// The box with the alternatives of one token. choose(element, alternative) is called with what is clicked.
export class Alternatives {
  constructor(box, tokenOf, choose) {
    this.box = box;
    this.tokenOf = tokenOf; // element -> token
    this.choose = choose;
    this.of = null; // the element that it is open for
    this.stays = false; // until it is closed, not only while the pointer is there
    this.leaving = 0;
    box.addEventListener("pointerenter", () => clearTimeout(this.leaving));
    box.addEventListener("pointerleave", () => this.leave());
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("focusout", (event) => {
      if (!box.contains(event.relatedTarget) && event.relatedTarget) this.close();
    });
  }

  hover(element) {
    clearTimeout(this.leaving);
    if (!this.stays) this.show(element);
  }

  leave() {
    clearTimeout(this.leaving);
    if (!this.stays) this.leaving = setTimeout(() => this.close(), LEAVING);
  }

  // Until it is closed, with the focus in it.
  open(element) {
    this.show(element);
    this.stays = true;
    (this.box.querySelector("button:not(:disabled)") ?? this.box).focus();
  }

  close(back = false) {
    clearTimeout(this.leaving);
    const { of } = this;
    this.of?.removeAttribute("aria-expanded");
    this.of = null;
    this.stays = false;
    this.box.hidden = true;
    if (back) of?.focus();
  }

  show(element) {
    if (this.of === element) return;
    this.close();
    const token = this.tokenOf(element);
    if (!token) return;
    this.of = element;
    element.setAttribute("aria-expanded", "true");
    const head = document.createElement("p");
    head.className = "note";
    const mark = { drafted: " · accepted draft", picked: " · picked by you" }[token.mark] ?? "";
    head.textContent = `${percent(token.logprob)} · id ${token.id}${mark}`;
    const entries = token.top.some((other) => other.id === token.id) ? token.top : [...token.top, token];
    const hint = document.createElement("p");
    hint.className = "note";
    hint.textContent = "Pick one to continue from it.";
    this.box.replaceChildren(head, ...entries.map((other) => this.entry(other, other.id === token.id)), hint);
    this.box.hidden = false;
    this.place(element);
  }

  entry(token, isChosen) {
    const button = document.createElement("button");
    button.type = "button";
    button.disabled = isChosen;
    if (isChosen) button.setAttribute("aria-current", "true");
    const text = document.createElement("span");
    text.className = "shown";
    text.textContent = visible(token);
    const share = document.createElement("span");
    share.textContent = percent(token.logprob);
    const bar = document.createElement("span");
    bar.className = "bar";
    bar.style.width = `${100 * Math.exp(token.logprob)}%`;
    button.append(text, share, bar);
    button.addEventListener("click", () => {
      const { of } = this;
      this.close();
      this.choose(of, token);
    });
    return button;
  }

  // The token has moved: the box moves with it, or closes if it was open for the pointer only.
  follow() {
    if (this.stays) this.place(this.of);
    else this.close();
  }

  // Under the token's first line, within the window.
  place(element) {
    const [line] = element.getClientRects();
    if (!line) return;
    const width = document.documentElement.clientWidth;
    const left = Math.max(8, Math.min(line.left, width - this.box.offsetWidth - 8));
    const below = line.bottom + this.box.offsetHeight + 4 < innerHeight;
    const top = below || line.top < this.box.offsetHeight ? line.bottom : line.top - this.box.offsetHeight;
    this.box.style.left = `${left}px`;
    this.box.style.top = `${Math.max(8, Math.min(top, innerHeight - this.box.offsetHeight - 8))}px`;
  }

  key(event) {
    const buttons = [...this.box.querySelectorAll("button:not(:disabled)")];
    const at = buttons.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (event.key === "Escape") this.close(true);
    else if (to !== undefined) buttons.at(to % buttons.length)?.focus();
    else return;
    event.preventDefault();
  }
}

export function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toPrecision(share >= 99.95 ? 4 : 3)}%` : "< 0.1%";
}

function shade(logprob) {
  const bounds = [0.9, 0.5, 0.2, 0.05];
  const at = bounds.findIndex((bound) => Math.exp(logprob) >= bound);
  return `p${at < 0 ? bounds.length : at}`;
}

// A token's text with its blanks made visible.
function visible(token) {
  if (!token.text) return `(no text, id ${token.id})`;
  return token.text.replace(/^ | $/g, "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}
