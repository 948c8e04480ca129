// The scrolling of the conversation in its column: it follows the text, unless the reader has scrolled up.

const conversation = document.querySelector("#conversation");
const latest = document.querySelector("#latest"); // the button that leads to the end
let follows = true; // whether the reader is at the end

function isAtEnd() {
  return conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 24;
}

export function toEnd() {
  conversation.scrollTop = conversation.scrollHeight;
  follows = true;
}

function scrolled() {
  follows = isAtEnd();
  latest.hidden = follows;
}

// Make a change of the conversation. A reader at its end stays there.
export function following(change) {
  const wasAtEnd = isAtEnd();
  change();
  if (wasAtEnd) toEnd();
  scrolled();
}

conversation.addEventListener("scroll", scrolled);
new ResizeObserver(() => (follows ? toEnd() : scrolled())).observe(conversation);
