"""Documents of every kind, and the split into training and held-out text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from .chat import make_chat
from .extraction import make_extraction, make_note
from .grammar import expand
from .openings import make_opened_story
from .story import make_story
from .tools import make_tool_chat

END_OF_TEXT = "<|endoftext|>"
KINDS = ("story", "qa", "json", "chat", "tools")
# Share of documents, not of tokens: a conversation is longer than an extraction.
WEIGHTS = (0.36, 0.08, 0.08, 0.22, 0.26)
EVEN = (1.0,) * len(KINDS)

# A text that is to be asked about mostly says so at its start.
QA_HEADERS = ("Read the text and answer the questions.", "Text and questions:", "Answer the questions about this text.")
JSON_HEADERS = ("Read the text and write JSON.", "Text and JSON:", "Extract facts from this text as JSON.")
HEADER_SHARE = 0.7


class Document(NamedTuple):
    """A text, and how many characters at its start are a prompt: read by the model and never learned as its own.

    Only a story is learned from its first word on. A text without a header that questions follow is all prompt up to
    its first answer, so that no story ever turns into one.
    """

    kind: str
    text: str
    prompt: int = 0


def make_document(rng: random.Random, kind: str) -> Document:
    makers = {"story": _make_story, "qa": _make_qa, "json": _make_json}
    if kind in makers:
        return makers[kind](rng)
    return Document(kind, make_tool_chat(rng) if kind == "tools" else make_chat(rng))


def _make_story(rng: random.Random) -> Document:
    if rng.random() < 0.65:
        return Document("story", make_story(rng, short=rng.random() < 0.25, invented=0.12).text + "\n")
    prompt, rest = make_opened_story(rng)
    return Document("story", f"{prompt}{rest}\n", len(prompt))


def _make_qa(rng: random.Random) -> Document:
    """A text, then questions with short or full answers."""
    source = make_note(rng) if rng.random() < 0.4 else make_story(rng, short=rng.random() < 0.7)
    full = rng.random() < 0.6
    lines = [source.text, ""]
    for question in source.questions[: rng.randint(1, 6)]:
        answer = question.full if full else expand(rng, question.short, {})
        lines += [f"Question: {question.text}", f"Answer: {answer}"]
    return _with_header(rng, "qa", QA_HEADERS, "\n".join(lines) + "\n", "Answer:")


def _make_json(rng: random.Random) -> Document:
    """A text, then one or more requests, each with its JSON."""
    source = make_note(rng) if rng.random() < 0.5 else make_story(rng, short=rng.random() < 0.8)
    parts = [source.text]
    for _ in range(rng.randint(1, 3)):
        extraction = make_extraction(rng, source)
        parts.append(f"{extraction.request}\n{extraction.answer}")
    return _with_header(rng, "json", JSON_HEADERS, "\n\n".join(parts) + "\n", "\n{")


def _with_header(rng: random.Random, kind: str, headers: tuple[str, ...], text: str, answer: str) -> Document:
    if rng.random() < HEADER_SHARE:
        header = rng.choice(headers)
        return Document(kind, f"{header}\n\n{text}", len(header))
    return Document(kind, text, text.index(answer) + len(answer.rstrip("{")))


def documents(
    seed: int, count: int, exclude: frozenset[str] = frozenset(), weights: tuple[float, ...] = WEIGHTS
) -> Iterator[Document]:
    """Yield `count` documents, no long one twice, and none whose text is in `exclude`."""
    rng = random.Random(seed)
    seen = set(exclude)
    while count > 0:
        document = make_document(rng, rng.choices(KINDS, weights)[0])
        # Small talk alone has few variants: let it repeat in training, where it must be learned by
        # heart, but never across the split.
        if document.text in exclude or (document.text in seen and len(document.text) > 400):
            continue
        seen.add(document.text)
        count -= 1
        yield document


def tool_chats(seed: int, count: int) -> list[str]:
    """Conversations with tools alone, for a seed that nothing was trained on."""
    rng = random.Random(seed)
    return [make_tool_chat(rng) for _ in range(count)]
