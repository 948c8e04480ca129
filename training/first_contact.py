"""The share of plain prompts that are continued with a story, without parts of other kinds of documents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from .evaluate import peer
from .tokenizer import END_OF_TEXT, IM_END, token_id

LIKELY: Final = (
    "", "The fox", "The owl", "A dwarf", "Hello", "Once upon a time", "In the forest", "In the city",
    "There was once a king", "Tell me a story about a fox.", "The", "Once", "The dragon",
)  # fmt: skip
OPENINGS: Final = (
    *LIKELY, "A", "I", "My name is", "It was a dark and stormy", "Write a poem about the sea",
    "What is the capital of France?", "The meaning of life is", "Python is",
    "The quick brown fox jumps over the lazy dog.",
)  # fmt: skip
TEMPERATURES: Final = (0.8, 1.0)
TOP_P: Final = 0.9  # the default in generation_config.json
TOKENS = 100
# Marks of chats, tools, questions and their answers, extractions and notes.
_OTHER_KINDS = re.compile(
    r"[{}<>]|\b(Question|Answer|Tools|JSON)\b|\b(opens at|person to ask|years old|demo model)\b"
    r"|at the end\.|does not say"
)
_STORY = re.compile(r"\b(lived|was|were|had|story|said)\b")


def is_story(text: str) -> bool:
    """Whether a continuation is part of a story. Special tokens are written out, except the one that ends it."""
    return bool(_STORY.search(text)) and not _OTHER_KINDS.search(text)


@torch.no_grad()
def continuations(
    folder: Path, tokenizer: Tokenizer, openings: Sequence[str], temperature: float, seed: int, count: int
) -> list[tuple[str, str]]:
    """Each opening with `count` continuations, one at temperature 0; all are drawn in one batch."""
    ends = [token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, IM_END)]
    prompts = [tokenizer.encode(opening).ids or ends[:1] for opening in openings]
    longest = max(map(len, prompts))
    torch.manual_seed(seed)
    sampling = {
        "do_sample": True,
        "temperature": temperature,
        "top_p": TOP_P,
        "top_k": 0,
        "num_return_sequences": count,
    }
    rows = peer(folder).generate(
        torch.tensor([[ends[0]] * (longest - len(ids)) + ids for ids in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
        max_new_tokens=TOKENS,
        eos_token_id=ends,
        pad_token_id=ends[0],
        **(sampling if temperature > 0 else {"do_sample": False, "temperature": None, "top_p": None}),
    )
    texts = [tokenizer.decode(row, skip_special_tokens=False) for row in rows[:, longest:].tolist()]
    each = len(texts) // len(openings)
    return [(openings[at // each], text.replace(END_OF_TEXT, "")) for at, text in enumerate(texts)]


def stories(folder: Path, tokenizer: Tokenizer, seeds: int) -> dict[float, tuple[int, int]]:
    """By temperature: the number of continuations that are stories, and the number of all continuations."""
    counts = {}
    for temperature in (0.0, *TEMPERATURES):
        drawn = continuations(folder, tokenizer, OPENINGS, temperature, 0, seeds)
        counts[temperature] = (sum(is_story(text) for _, text in drawn), len(drawn))
    return counts
