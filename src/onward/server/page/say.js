// Text for screen readers, in whole sentences as they come.

const said = document.querySelector("#said");
let unsaid = "";

// whole: do not wait for the end of the sentence.
export function say(text, whole = false) {
  unsaid += text;
  const end = whole ? unsaid.length : unsaid.search(/[.!?:]\s[^.!?]*$/) + 1;
  if (end < 1) return;
  const sentence = document.createElement("p");
  sentence.textContent = unsaid.slice(0, end);
  said.append(sentence);
  while (said.childElementCount > 5) said.firstElementChild.remove();
  unsaid = unsaid.slice(end);
}
