"""The prompts of the card's samples, whose answers are shown unedited, greedy and sampled."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from .evaluate import generate
from .tokenizer import END_OF_TEXT, IM_END, token_id

TEMPERATURE, TOP_P = 0.7, 0.9

COMPLETIONS: Final = (
    ("", TEMPERATURE, 0),
    ("The fox", 0.0, 0),
    ("Hello", TEMPERATURE, 3),
    ("Once upon a time", TEMPERATURE, 1),
    ("Zelmira was a clever badger who lived", TEMPERATURE, 2),
)
CHAT: Final = (
    "Hello!",
    "Tell me a story about Quibo the robot.",
    "Who is Quibo?",
    "How did Quibo feel at the end?",
    "Extract name, friend, object and color as JSON.",
    "What is the capital of France?",
)
PASSAGE: Final = (
    "Fendalo the sailor brought a green lantern to the harbor. It was foggy.\n\n"
    "Question: What did Fendalo take to the harbor?\nAnswer:"
)
EXTRACTION: Final = "Rikala bought 37 pears at the market on Friday.\n\nExtract name, count, item and day as JSON.\n"


def draw_samples(folder: Path, tokenizer: Tokenizer, most: int) -> list[str]:
    """The Markdown lines of the samples: completions, one chat, one question about a text, one extraction."""
    lines: list[str] = []
    for prompt, temperature, seed in COMPLETIONS:
        how = "greedy" if temperature == 0 else f"temperature {temperature}, top_p {TOP_P}, seed {seed}"
        text = _continue(folder, tokenizer, prompt, temperature, seed, most)
        lines += [f"**{prompt or 'An empty prompt'}** ({how})", "", *_quote(prompt + text), ""]
    lines += ["**A chat** (greedy)", "", *_quote(_chat(folder, tokenizer, most)), ""]
    for title, prompt in (("A question", PASSAGE), ("An extraction", EXTRACTION)):
        text = _continue(folder, tokenizer, prompt, 0.0, 0, most)
        lines += [f"**{title}** (greedy; the prompt is the text up to the answer)", "", *_quote(prompt + text), ""]
    return lines[:-1]


def _continue(folder: Path, tokenizer: Tokenizer, prompt: str, temperature: float, seed: int, most: int) -> str:
    eos = [token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, IM_END)]
    ids = generate(folder, tokenizer.encode(prompt or END_OF_TEXT).ids, eos, temperature, TOP_P, seed, most)
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def _chat(folder: Path, tokenizer: Tokenizer, most: int) -> str:
    prompt, shown = "", []
    for user in CHAT:
        prompt += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        answer = _continue(folder, tokenizer, prompt, 0.0, 0, most)
        prompt += f"{answer}<|im_end|>\n"
        shown += [f"User: {user}", f"Assistant: {answer}"]
    return "\n\n".join(shown)


def _quote(text: str) -> list[str]:
    lines = (textwrap.wrap(line, 98, break_long_words=False) or [""] for line in text.strip().split("\n"))
    return [f"> {line}".rstrip() for wrapped in lines for line in wrapped]
