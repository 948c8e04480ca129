"""What comes back: pieces while it runs, a completion when it is done, and how long it took."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onward.decoding import TokenLogprobs
from onward.decoding.row import FinishReason, StoppedBy
from onward.speculation import Speculation


class Piece(NamedTuple):
    """One token as it comes.

    text: what became final with it; empty while a character or a possible stop string is unfinished.
    token_id: the token.
    logprobs: its own and the likeliest ids', where they were asked for.
    """

    text: str
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one completion; rows of a batch run together, so their times overlap.

    prefill_ms: processing the prompt, up to the first token.
    per_token_ms: one entry for each token after the first; tokens that one step brought share its time.
    total_ms: their sum.
    tokens_per_second: tokens after the first over the time they took; 0 where there are none.
    """

    prefill_ms: float
    per_token_ms: list[float]
    total_ms: float
    tokens_per_second: float

    def __repr__(self) -> str:
        return (
            f"Timing(prefill_ms={self.prefill_ms:.1f}, {len(self.per_token_ms)} more tokens in "
            f"{sum(self.per_token_ms):.1f} ms, {self.tokens_per_second:.1f} tokens/s)"
        )


@dataclass(frozen=True)
class Completion:
    """A finished text.

    text: what was generated, without the prompt, the ending id and the stop string.
    token_ids: every id generated, the ending one too.
    finish_reason: "stop" (an eos id, a stop string or `stop_when`), "length" (max_new_tokens), "time" (time_limit) or
        "cancelled" (cancel).
    stopped_by: what "stop" was due to: the ending id, the stop string, or the function `stop_when`; else None.
    timing: see `Timing`.
    prompt_tokens: how many ids the prompt had. cached_tokens: how many of them a session held already.
    seed: the one the text was drawn with, given or fresh: it gives the same text again. None if greedy.
    logprobs: of each of `token_ids`; None unless asked for.
    prompt_logprobs: of each of the prompt's ids, None for the first, which nothing predicts; None unless asked for.
    score: of a text that beams found, sum of logprobs / length^length_penalty; None without beams.
    others: the prompt's other texts, for n > 1; see `choices`.
    speculation: what drafting brought; None without a draft.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    timing: Timing
    prompt_tokens: int
    seed: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    score: float | None = None
    others: list["Completion"] = field(default_factory=list)
    cached_tokens: int = 0
    speculation: Speculation | None = None
    stopped_by: StoppedBy | None = None

    def __repr__(self) -> str:
        """One line; every field is an attribute."""
        text = self.text if len(self.text) <= 40 else f"{self.text[:39]}…"
        facts = [f"{len(self.token_ids)} tokens", f"finish_reason={self.finish_reason!r}"]
        facts += [] if self.seed is None else [f"seed={self.seed}"]
        facts += [f"{len(self.others)} others"] if self.others else []
        return f"Completion({text!r}, {', '.join(facts)})"

    @property
    def choices(self) -> list["Completion"]:
        """All texts of this prompt: this one, then the others. Samples in order; beams best first."""
        return [self, *self.others]


class Stopwatch:
    """What each row's tokens took.

    ahead: seconds spent on the prompts before the first step.
    """

    def __init__(self, rows: int, ahead: float = 0.0) -> None:
        self._laps_ms: list[list[float]] = [[] for _ in range(rows)]
        self._ahead_ms = ahead * 1e3

    def lap(self, seconds: float, owners: Sequence[int]) -> None:
        """A step of `seconds` that brought a token to each of these rows; a row is named once for each."""
        counts = Counter(owners) if len(owners) > 1 else {}
        for owner in owners:
            self._laps_ms[owner].append(seconds * 1e3 / counts.get(owner, 1))

    def timing(self, row: int) -> Timing:
        laps = self._laps_ms[row]
        rest = laps[1:]
        prefill = laps[0] + self._ahead_ms if laps else 0.0
        return Timing(
            prefill_ms=prefill,
            per_token_ms=rest,
            total_ms=prefill + sum(rest),
            tokens_per_second=1e3 * len(rest) / sum(rest) if rest else 0.0,
        )
