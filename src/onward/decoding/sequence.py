"""One text while it is made, and the one place that decides whether it has ended."""

import copy
import threading
import time
from collections import abc
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Literal, Self

from onward.cache import AdapterRef
from onward.errors import RequestError
from onward.sampling import ConstraintState, History, SamplingParams
from onward.sampling.logprobs import TokenLogprobs
from onward.tokenizer.text_stream import NoTextStream, SpecialTokenMark, TextStream

FinishReason = Literal["stop", "length", "time", "cancelled"]
# (ids so far, text so far) -> whether to end
StopWhen = Callable[[abc.Sequence[int], str], bool]

# The id of `eos`, the stop string or the `stop_when` that ended a text.
StoppedBy = int | str | StopWhen


class Sequence:
    """One text being made: its ids, how far they are computed, its streaming text, and how it ended.

    Its ids stand at absolute positions from `start` on: first the prompt, then `token_ids`. The positions before
    `computed` are in the cache; the ids from there on are pending. Prompts, their chunks, ids that a cache holds
    already and ids whose cache was given up differ in `computed` alone.

    finish_reason is None while the text goes on. It becomes
        "stop" after an id of `eos` (which is part of `token_ids` and not of the text), after a stop string, when the
            constraint lets nothing follow, or when `stop_when` returns True;
        "length" after `max_new_tokens`; at once where that is 0;
        "time" with the first token at or after `deadline` (on the clock `time.monotonic`);
        "cancelled" with the first token after any thread has set `cancel`.

    stopped_by is the id, the stop string or the function `stop_when` that ended the text with "stop"; otherwise None.

    prompt: ids, one at least. start: the position of the first; the cache holds the positions before it.
    output_at: the position of the first new id.
    sampling: how a token is chosen, with its seed; None where the step's chooser knows.
    adapter: that the model's weights are changed by; None for none.
    constraint: what may follow; None for everything.
    top_logprobs: how many of the likeliest ids to report with each token; None reports no logprobs at all.
    prompt_top: the same for the prompt's ids. `prompt_logprobs` collects them: None for the first id.
    replayed: how many of `token_ids` were emitted elsewhere. Their logprobs come when they are computed.
    cached: how many ids of the prompt were not processed, for the cache held them.
    slot: where the cache keeps the computed positions; None where there is none yet.
    history: the ids as penalties read them; made by the first chooser that reads it.
    drafting: what a speculative step knows of the text.
    """

    def __init__(
        self,
        prompt: abc.Sequence[int],
        max_new_tokens: int,
        eos: AbstractSet[int] = frozenset(),
        text: TextStream | None = None,
        *,
        start: int = 0,
        sampling: SamplingParams | None = None,
        adapter: AdapterRef | None = None,
        constraint: ConstraintState | None = None,
        top_logprobs: int | None = None,
        prompt_top: int | None = None,
        stop_when: StopWhen | None = None,
        deadline: float | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        assert prompt, "an empty prompt has nothing to predict from"
        self.prompt = prompt
        self.start = self.computed = start
        self.output_at = start + len(prompt)
        self.cached = 0
        self.sampling = sampling
        self.adapter = adapter
        self.constraint = constraint
        self.top_logprobs = top_logprobs
        self.prompt_top = prompt_top
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.slot: Any = None
        self.history: History | None = None
        self.drafting: Any = None
        self.token_ids: list[int] = []
        self.replayed = 0
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None if max_new_tokens > 0 else "length"
        if constraint is not None and constraint.is_done:
            self.finish_reason = "stop"
        self.stopped_by: StoppedBy | None = None
        self._max_new_tokens = max_new_tokens
        self._eos = eos
        self._stream = NoTextStream() if text is None else text
        self._stop_when = stop_when
        self._deadline = deadline
        self._cancel = cancel

    # ── where it stands ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def length(self) -> int:
        """The position after the last id."""
        return self.output_at + len(self.token_ids)

    @property
    def longest(self) -> int:
        """The most positions that the text may take."""
        return self.output_at + self._max_new_tokens

    @property
    def has_begun(self) -> bool:
        """Whether there is a token after the prompt."""
        return bool(self.token_ids)

    @property
    def room(self) -> int:
        """How many tokens the text may still take."""
        return self._max_new_tokens - len(self.token_ids)

    @property
    def marks(self) -> abc.Sequence[SpecialTokenMark]:
        """The special tokens among `token_ids` that say something, and where in the text each stands."""
        return self._stream.marks

    @property
    def ends(self) -> abc.Sequence[int]:
        """How many characters of the text and its marks are complete with each of `token_ids`, less the eos."""
        return self._stream.ends

    @property
    def pending(self) -> int:
        """How many ids are still to be computed before the text is as it should be.

        The last id of a text that has ended predicts nothing, so it never is. Others count after the end only where
        logprobs are missing.
        """
        if self.finish_reason is None:
            return self.output_at + len(self.token_ids) - self.computed  # written out, for every step asks often
        if self.scoring_from is None:
            return 0
        return (self.length if self._lacks_logprobs else self.output_at) - 1 - self.computed

    @property
    def scoring_from(self) -> int | None:
        """The first position after which logits are wanted for logprobs that are missing: of the prompt, or of ids that
        were emitted elsewhere. None where none are missing."""
        if self.prompt_top is not None and len(self.prompt_logprobs) < len(self.prompt):
            return self.start + len(self.prompt_logprobs) - 1
        return self.output_at + len(self.logprobs) - 1 if self._lacks_logprobs else None

    @property
    def _lacks_logprobs(self) -> bool:
        return self.top_logprobs is not None and len(self.logprobs) < len(self.token_ids)

    def holders(self) -> list["Sequence"]:
        """The sequences that have slots for this text: this one, or those that search for it."""
        return [] if self.slot is None else [self]

    def restart(self) -> None:
        """Begin to compute anew: the slot was given up. The ids stay as they are, and so will those that follow."""
        self.computed = self.start

    def read_history(self) -> History:
        """The ids so far as penalties read them."""
        if self.history is None:
            self.history = History(self.prompt, self.token_ids)
        return self.history

    def ids(self, first: int, last: int) -> list[int]:
        """The ids at the positions first … last - 1. Those before `start` are known to the cache alone."""
        assert first >= self.start, (first, self.start)
        if first == last - 1 == self.length - 1 and self.token_ids:
            return self.token_ids[-1:]
        first, last, prompt = first - self.start, last - self.start, len(self.prompt)
        return [*self.prompt[first:last], *self.token_ids[max(0, first - prompt) : max(0, last - prompt)]]

    def computed_ids(self) -> list[int]:
        """The ids whose keys and values are in the slot, as the slot is released with them.

        None are given where the text does not begin at position 0: then nobody knows all of them.
        """
        return self.ids(0, self.computed) if self.start == 0 else []

    def reusable_ids(self) -> list[int]:
        """The ids whose keys and values need not be computed where a cache holds them, and the one after them."""
        first = self.scoring_from
        return self.ids(self.start, self.length if first is None else first + 1)

    # ── how it goes on and ends ─────────────────────────────────────────────────────────────────────────────────

    def replay(self, token_ids: abc.Sequence[int]) -> list[str]:
        """Take ids that were emitted elsewhere, before any others, and return the text that became final with each.

        They end the text as they did there. What ended it from outside (`deadline`, `cancel`) does so from the next
        token on.

        Raises:
            RequestError: ids that the constraint refuses, or that go on after the text has ended.
        """
        assert not self.token_ids, "ids from elsewhere come first"
        self.replayed = len(token_ids)
        texts: list[str] = []
        for token in token_ids:
            if self.finish_reason is not None:
                raise RequestError(
                    f"the text ends ({self.finish_reason!r}) with {len(texts)} of the {len(token_ids)} ids in emitted: "
                    "give those that were emitted for this prompt and these options"
                )
            if self.constraint is not None and not self.constraint.admits(token):
                raise RequestError(
                    f"emitted[{len(texts)}] is id {token}, which the request's constraint forbids there: give the ids "
                    "that were emitted for this prompt and these options"
                )
            texts.append(self.accept(token))
        return texts

    def take_back(self, count: int, text: str) -> None:
        """Keep the first `count` of the ids of a text that was ended, whose text is `text`."""
        del self.token_ids[count:]
        self.text = text

    def accept(self, token_id: int, logprobs: TokenLogprobs | None = None) -> str:
        """Take the next token and return the text that became final with it."""
        assert self.finish_reason is None, "a sequence that has ended takes no tokens"
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.append(token_id)
        if self.constraint is not None:
            self.constraint.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        piece, eos = "", token_id if token_id in self._eos else None
        if eos is not None:
            self.finish_reason, self.stopped_by = "stop", eos
        else:
            piece = self._stream.push(token_id)
            self.finish_reason = self._reason_to_end(piece)
        if self.finish_reason is not None:
            piece += self._stream.flush(eos)
            if self._stream.stopped_by is not None:
                # An unfinished character, or the text of the eos, can complete a stop string.
                self.finish_reason, self.stopped_by = "stop", self._stream.stopped_by
        self.text += piece
        return piece

    def end(self, reason: FinishReason) -> None:
        """End the text between two steps. Text that was not final yet is not part of it.

        A text that has ended goes on as long as logprobs of its prompt, or of ids from elsewhere, are to come.
        """
        assert self.finish_reason is None or self.pending, "a sequence that has ended is final"
        self.finish_reason, self.stopped_by = reason, None

    def reopen(self) -> None:
        """Go on all the same. A draft model's text is a guess: it may end where the target's does not."""
        self.finish_reason = None

    def fork(self) -> Self:
        """A copy that goes on from here by itself, as the beams of a search do. It has no slot yet."""
        other = copy.copy(self)
        other.token_ids, other.logprobs = self.token_ids.copy(), self.logprobs.copy()
        other.history = None if self.history is None else self.history.fork()
        other.constraint = None if self.constraint is None else self.constraint.fork()
        other.slot = None
        other._stream = self._stream.fork()
        return other

    def take_over(self, ended: "Sequence") -> None:
        """Take the text of `ended`, a fork of this sequence that has ended."""
        assert self.finish_reason is None, "a sequence that has ended is final"
        assert ended.finish_reason is not None, "only a sequence's own end ends it"
        fork = ended.fork()
        self.token_ids, self.logprobs, self.text, self._stream = fork.token_ids, fork.logprobs, fork.text, fork._stream
        self.finish_reason, self.stopped_by, self.constraint = fork.finish_reason, fork.stopped_by, fork.constraint

    def _reason_to_end(self, piece: str) -> FinishReason | None:
        if self._stream.stopped_by is not None:
            return "stop"
        if self.constraint is not None and self.constraint.is_done:
            return "stop"
        if self._stop_when is not None and self._stop_when(self.token_ids, self.text + piece):
            self.stopped_by = self._stop_when
            return "stop"
        if len(self.token_ids) == self._max_new_tokens:
            return "length"
        if len(self.token_ids) <= self.replayed:
            return None
        if self._cancel is not None and self._cancel.is_set():
            return "cancelled"
        return "time" if self._deadline is not None and time.monotonic() >= self._deadline else None
