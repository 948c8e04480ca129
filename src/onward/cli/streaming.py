"""Following a text as it is generated, and what to say of it afterwards."""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from onward.cli.terminal import waiting

if TYPE_CHECKING:
    from onward import Completion, Piece


def follow(stream: "Generator[Piece, None, Completion]", emit: "Callable[[Piece], None]") -> "Completion":
    """Hand every piece to `emit` as it comes; a spinner turns until the first one is there."""
    try:
        with waiting("reading the prompt …"):
            piece = next(stream)
        while True:
            emit(piece)
            piece = next(stream)
    except StopIteration as end:
        completion: Completion = end.value
        return completion


def summary(completion: "Completion") -> str:
    """Such as '64 tokens (cut) · 250 tok/s · prefill 5 in 12 ms · seed 7', which fits 80 columns with any seed."""
    timing = completion.timing
    parts = [
        count(len(completion.token_ids), "token") + (" (cut)" if completion.finish_reason == "length" else ""),
        f"{timing.tokens_per_second:.0f} tok/s" if timing.per_token_ms else "",
        f"prefill {completion.prompt_tokens - completion.cached_tokens:,} in {timing.prefill_ms:.0f} ms",
        "greedy" if completion.seed is None else f"seed {completion.seed}",
    ]
    return " · ".join(part for part in parts if part)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
