"""Documents of every kind, and the split into training and held-out text."""

from __future__ import annotations

import random
from collections.abc import Iterator

from .chat import make_chat
from .extraction import make_extraction, make_note
from .grammar import expand
from .story import make_story
from .tools import make_tool_chat

END_OF_TEXT = "<|endoftext|>"
KINDS = ("story", "qa", "json", "chat")
# Share of documents, not of tokens: a chat is longer than an extraction.
WEIGHTS = (0.30, 0.14, 0.14, 0.42)
# What the finished model learns afterwards, with the rest among it so that nothing is forgotten.
TOOLS = "tools"
TOOLS_SHARE = 0.55


# A text that is to be asked about mostly says so at its start, so that a story which begins like a
# story ends like one.
QA_HEADERS = ("Read the text and answer the questions.", "Text and questions:", "Answer the questions about this text.")
JSON_HEADERS = ("Read the text and write JSON.", "Text and JSON:", "Extract facts from this text as JSON.")
HEADER_SHARE = 0.85


def _header(rng: random.Random, headers: tuple[str, ...]) -> list[str]:
    return [rng.choice(headers), ""] if rng.random() < HEADER_SHARE else []


def make_qa(rng: random.Random) -> str:
    """A text, then questions with short or full answers."""
    source = make_note(rng) if rng.random() < 0.25 else make_story(rng, short=rng.random() < 0.7)
    full = rng.random() < 0.6
    lines = [*_header(rng, QA_HEADERS), source.text, ""]
    for question in source.questions[: rng.randint(1, 6)]:
        answer = question.full if full else expand(rng, question.short, {})
        lines += [f"Question: {question.text}", f"Answer: {answer}"]
    return "\n".join(lines) + "\n"


def make_json(rng: random.Random) -> str:
    """A text, then one or more requests, each with its JSON."""
    source = make_note(rng) if rng.random() < 0.4 else make_story(rng, short=rng.random() < 0.8)
    parts = [*_header(rng, JSON_HEADERS)[:1], source.text]
    for _ in range(rng.randint(1, 3)):
        extraction = make_extraction(rng, source)
        parts.append(f"{extraction.request}\n{extraction.answer}")
    return "\n\n".join(parts) + "\n"


def make_document(rng: random.Random, kind: str) -> str:
    if kind == "story":
        return make_story(rng, short=rng.random() < 0.25).text + "\n"
    if kind == "qa":
        return make_qa(rng)
    if kind == "json":
        return make_json(rng)
    return make_tool_chat(rng) if kind == TOOLS else make_chat(rng)


def documents(seed: int, count: int, exclude: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yield `count` (kind, text) pairs, none of them twice, none of them in `exclude`."""
    rng = random.Random(seed)
    seen = set(exclude)
    while count > 0:
        kind = rng.choices(KINDS, WEIGHTS)[0]
        text = make_document(rng, kind)
        # Small talk alone has few variants: let it repeat in training, where it must be learned by
        # heart, but never across the split.
        if text in exclude or (text in seen and len(text) > 400):
            continue
        seen.add(text)
        count -= 1
        yield kind, text


def tuning_documents(seed: int, count: int, exclude: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yield `count` (kind, text) pairs with and without tools, none of them in `exclude`."""
    rng = random.Random(seed)
    while count > 0:
        kind = TOOLS if rng.random() < TOOLS_SHARE else rng.choices(KINDS, WEIGHTS)[0]
        text = make_document(rng, kind)
        if text not in exclude:
            count -= 1
            yield kind, text


def tool_chats(seed: int, count: int) -> list[str]:
    """Conversations with tools alone, for a seed that nothing was trained on."""
    rng = random.Random(seed)
    return [make_tool_chat(rng) for _ in range(count)]
