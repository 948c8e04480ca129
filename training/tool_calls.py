"""The share of correct greedy answers in conversations with tools, drawn with a separate seed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .evaluate import generate
from .tokenizer import END_OF_TEXT, IM_END, token_id

# The maximum of an answer: two calls have about a hundred tokens. Longer answers are stories, which have no calls.
MOST = 110
_ANSWER = re.compile(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", re.DOTALL)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Asked:
    """One answer of a conversation. kind: "call", "calls", "result" (a result is read back) or "talk"."""

    kind: str
    prompt: str
    wanted: str

    def is_right(self, answer: str) -> bool:
        """Calls are compared as JSON, and texts after results literally; talk must not contain a call."""
        if self.kind == "talk":
            return "<tool_call>" not in answer
        if self.kind == "result":
            return answer.strip() == self.wanted
        return calls_of(answer) == calls_of(self.wanted)


def calls_of(answer: str) -> list[Any] | None:
    """The calls of an answer as JSON; None if a call is invalid."""
    try:
        return [json.loads(call) for call in _CALL.findall(answer)]
    except ValueError:
        return None


def asked_in(conversation: str) -> Iterator[Asked]:
    """All answers of a conversation, each with the text before it."""
    for match in _ANSWER.finditer(conversation):
        prompt, wanted = conversation[: match.start(1)], match[1]
        calls = wanted.count("<tool_call>")
        last = prompt.rsplit("<|im_start|>", 2)[1].partition("\n")[0]
        kind = ("result" if last == "tool" else "talk", "call", "calls")[min(calls, 2)]
        yield Asked(kind, prompt, wanted)


def right_answers(folder: Path, tokenizer: Tokenizer, conversations: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The numbers of correct and of all answers, by kind. Conversations that nearly fill the context are skipped."""
    eos = [token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, IM_END)]
    right, asked = Counter[str](), Counter[str]()
    for each in (one for text in conversations for one in asked_in(text)):
        ids = tokenizer.encode(each.prompt).ids
        if len(ids) + MOST > 1024:
            continue
        answer = tokenizer.decode(generate(folder, ids, eos, 0.0, 1.0, 0, MOST), skip_special_tokens=True)
        asked[each.kind] += 1
        right[each.kind] += each.is_right(answer)
    return {kind: (right[kind], asked[kind]) for kind in sorted(asked)}
