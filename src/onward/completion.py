"""What comes back: pieces while it runs, a completion when it is done, and how long it took."""

from dataclasses import dataclass
from typing import NamedTuple

from onward.decoding.row import FinishReason


class Piece(NamedTuple):
    """One token as it comes.

    text: what became final with it; empty while a character or a possible stop string is unfinished.
    token_id: the token.
    """

    text: str
    token_id: int


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one completion; rows of a batch run together, so their times overlap.

    prefill_ms: processing the prompt, up to the first token.
    per_token_ms: one entry for each token after the first.
    total_ms: their sum.
    tokens_per_second: tokens after the first over the time they took; 0 where there are none.
    """

    prefill_ms: float
    per_token_ms: list[float]
    total_ms: float
    tokens_per_second: float


@dataclass(frozen=True)
class Completion:
    """A finished text.

    text: what was generated, without the prompt, the ending id and the stop string.
    token_ids: every id generated, the ending one too.
    finish_reason: "stop" (an eos id or a stop string) or "length" (max_new_tokens).
    timing: see `Timing`.
    prompt_tokens: how many ids the prompt had.
    seed: the one the text was drawn with, given or fresh: it gives the same text again. None if greedy.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    timing: Timing
    prompt_tokens: int
    seed: int | None = None


class Stopwatch:
    """Collects what each step took."""

    def __init__(self) -> None:
        self._laps_ms: list[float] = []

    def lap(self, seconds: float) -> None:
        self._laps_ms.append(seconds * 1e3)

    def timing(self, tokens: int) -> Timing:
        """The times of a row that emitted `tokens`, one a step, and then ended."""
        laps = self._laps_ms[:tokens]
        rest = laps[1:]
        return Timing(
            prefill_ms=laps[0] if laps else 0.0,
            per_token_ms=rest,
            total_ms=sum(laps),
            tokens_per_second=1e3 * len(rest) / sum(rest) if rest else 0.0,
        )
