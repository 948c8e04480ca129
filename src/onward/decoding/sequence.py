"""A sequence during generation: the single place that decides when it ends."""

import copy
import math
import threading
import time
from collections import abc
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Literal, Self

from onward.cache import AdapterRef
from onward.decoding.cache_manager import CacheManager, Pinned, Slot
from onward.decoding.tap_capture import TapCapture, TapPositions
from onward.sampling import ConstraintState, History, SamplingParams
from onward.sampling.logprobs import Token, TokenLogprobs
from onward.tokenizer.text_stream import NoTextStream, SpecialTokenMark, TextStream
from onward.util.process import sigint_deferred

FinishReason = Literal["stop", "length", "time", "cancelled"]
# (ids so far, text so far) -> whether to stop
StopWhen = Callable[[abc.Sequence[int], str], bool]

# The id of `eos`, the stop string or the `stop_when` that ended a sequence.
StoppedBy = int | str | StopWhen

# The index of an output token, its id, the text that became final with it, whether it was drafted: a fast plain tuple.
TakenToken = tuple[int, int, str, bool]


class Sequence:
    """One sequence: its ids, the number of computed positions, its streamed text, and how it ended.

    Its ids have absolute positions from `start` on: first the prompt, then `token_ids`. The positions before `computed`
    are in the cache; the ids from there on are pending. Prompts, their chunks, cached ids and preempted sequences
    differ only in `computed`.

    finish_reason is None while the sequence is running. It becomes
        "stop" after an id of `eos` (part of `token_ids`, but not of the text), after a stop string, when the constraint
            allows no continuation, or when `stop_when` returns True;
        "length" after `max_new_tokens`; immediately if that is 0;
        "time" with the first token at or after `deadline` (on the clock `time.monotonic`);
        "cancelled" with the first token after any thread has set `cancel`.

    stopped_by: the id, the stop string or the `stop_when` that ended it with "stop"; otherwise None.
    prompt: at least one id. start: the position of the first; earlier positions are only in the cache. output_at: the
        position of the first new id. cached: the number of prompt ids that its first slot had; None before, and if the
        slot is a fork.
    sampling: the sampling parameters, with the seed; None if the token sampler needs none.
    top_logprobs: how many of the most likely ids to report with each token; None reports no logprobs. prompt_top: the
        same for the prompt's ids, in `prompt_logprobs`: None for the first id. sampling_logprobs: whether each token
        has that of the distribution that it was drawn from. capture: values at taps.
    salt: only texts with an equal one share cached prefixes.
    replayed: how many of `token_ids` were emitted elsewhere. Their logprobs are added when they are computed.
    slot: the cache slot, once there is one, with room for `reserved` positions. pinned: the `PinnedPrefix` of its
        session, if any.
    history: the ids for penalties. drafting: the state of a speculative step. weights_versions: as in `Completion`.
    step: the `Step` that runs it; None: the plain one. leader: one with the same prompt, whose computed part it takes.
    error: the exception of its step or of one of its functions, if the loop isolates errors; it takes no more tokens.
    lap_seconds, waited: the seconds of each new token, and of the steps since the last one.
    parser: parses its text, in a chat. streams: whether its tokens are final one by one.
    """

    streams = True

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
        salt: str | None = None,
        constraint: ConstraintState | None = None,
        top_logprobs: int | None = None,
        prompt_top: int | None = None,
        sampling_logprobs: bool = False,
        taps: abc.Mapping[str, TapPositions] | None = None,
        stop_when: StopWhen | None = None,
        deadline: float = math.inf,
        cancel: threading.Event | None = None,
    ) -> None:
        assert prompt, "an empty prompt has nothing to predict from"
        self.prompt = prompt
        self.start, self.computed, self.output_at = start, start, start + len(prompt)
        self.cached: int | None = None
        self.adapter, self.salt, self.sampling, self.constraint = adapter, salt, sampling, constraint
        self.top_logprobs, self.prompt_top, self.sampling_logprobs = top_logprobs, prompt_top, sampling_logprobs
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.capture = TapCapture(taps, start, self.output_at - 1) if taps else None
        self.slot: Slot | None = None
        self.pinned: Pinned | None = None
        self.history: History | None = None
        self.drafting: Any = None
        self.step: Any = None
        self.leader: Sequence | None = None
        self.error: BaseException | None = None
        self.parser: Any = None
        self.lap_seconds: list[float] = []
        self.weights_versions: list[tuple[int, int]] = []
        self.waited, self.replayed, self.reserved = 0.0, 0, 0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None if max_new_tokens > 0 else "length"
        if constraint is not None and constraint.is_done:
            self.finish_reason = "stop"
        self.stopped_by: StoppedBy | None = None
        self.text, self._max_new_tokens, self._eos = "", max_new_tokens, eos
        self._stream = NoTextStream() if text is None else text
        self._stop_when, self._deadline, self._cancel = stop_when, deadline, cancel
        self._undelivered: list[TakenToken] = []

    @property
    def length(self) -> int:
        """The position after the last id."""
        return self.output_at + len(self.token_ids)

    @property
    def longest(self) -> int:
        """The most positions that the sequence may reach."""
        return self.output_at + self._max_new_tokens

    @property
    def has_prompt(self) -> bool:
        """Whether its slot has the prompt, but its last id."""
        return self.slot is not None and self.computed >= self.output_at - 1

    @property
    def has_begun(self) -> bool:
        """Whether it has tokens after the prompt."""
        return bool(self.token_ids)

    @property
    def decoded(self) -> int:
        """The number of tokens decoded so far."""
        return len(self.token_ids) - self.replayed

    @property
    def room(self) -> int:
        """The number of tokens that may still be added."""
        return self._max_new_tokens - len(self.token_ids)

    @property
    def marks(self) -> abc.Sequence[SpecialTokenMark]:
        """The meaningful special tokens among `token_ids`, with their places in the text."""
        return self._stream.marks

    @property
    def ends(self) -> abc.Sequence[int]:
        """For each of `token_ids` but the eos, the number of complete characters of the text and its marks."""
        return self._stream.ends

    @property
    def pending(self) -> int:
        """The number of ids still to be computed.

        The last id of an ended sequence predicts nothing, so it is computed only if it is the prompt's last id, with
        missing values at taps. The others count after the end only if logprobs or such values are missing.
        """
        if self.finish_reason is None:
            return self.output_at + len(self.token_ids) - self.computed  # inlined: every step reads this often
        end = self.computed
        if self.capture is not None and self.capturing_from is not None:
            end = self.capture.end(self.length)
        if self.scoring_from is not None:
            lacks_logprobs = self.top_logprobs is not None and len(self.logprobs) < len(self.token_ids)
            end = max(end, (self.length if lacks_logprobs else self.output_at) - 1)
        return end - self.computed

    @property
    def capturing_from(self) -> int | None:
        """The first position with missing values at taps; None if there are none."""
        return None if self.capture is None else self.capture.missing_from(self.length)

    @property
    def missing_from(self) -> int | None:
        """The first position that has to be processed for logprobs, or for values at taps."""
        return min((at for at in (self.scoring_from, self.capturing_from) if at is not None), default=None)

    @property
    def scoring_from(self) -> int | None:
        """The first position whose logits give missing logprobs: of the prompt, or of replayed ids. None if no logprobs
        are missing."""
        if self.prompt_top is not None and len(self.prompt_logprobs) < len(self.prompt):
            return self.start + len(self.prompt_logprobs) - 1
        if self.top_logprobs is None or len(self.logprobs) >= len(self.token_ids):
            return None
        return self.output_at + len(self.logprobs) - 1

    def holders(self) -> list["Sequence"]:
        """The sequences that have slots for this request: this one, or the beams of its search."""
        return [] if self.slot is None else [self]

    def results(self, count: int) -> list[tuple[float | None, "Sequence"]]:
        """The ended texts, each with its score: this one without a score, or the best `count` beams of its search."""
        return [(None, self)]

    def acquire(self, slots: CacheManager, length: int, most: int | None = None, instead: Slot = None) -> bool:
        """Take a slot of `length` positions, with the cached prefix of the first `most` ids (by default all), in place
        of another slot, if any. Returns False, with nothing changed, if there is no room now."""
        prefix = self.pinned
        acquired = slots.acquire(
            self.reusable_ids()[:most],
            length,
            reuse=not self.start and self.missing_from != 0,
            adapter=self.adapter,
            salt=self.salt,
            pin=instead if prefix is None else prefix.pin,
        )
        if acquired is None:
            return False
        if prefix is not None:
            prefix.pin = None  # it was released
        self.slot, reused = acquired
        self.reserved, self.computed = length, self.start + reused
        if self.cached is None or (instead is not None and not self.token_ids):
            self.cached = min(reused, len(self.prompt))
        return True

    def take_restored(self, positions: int) -> None:
        """The slot has so many positions instead: the first ones were read from a disk. 0 if none were."""
        if positions:
            if self.cached == self.computed - self.start and not self.token_ids:
                self.cached = min(positions, len(self.prompt))
            self.computed = self.start + positions

    def fork_slot(self, slots: CacheManager, leader: "Sequence") -> bool:
        """Take a slot that shares the prompt with another's, but its last id, which every sequence processes itself.
        Returns False if that is not possible, or if there is no room now."""
        computed = leader.output_at - 1
        self.slot = slots.fork(leader.slot, computed, self.longest)
        if self.slot is None:
            return False
        self.computed, self.reserved = computed, self.longest
        return True

    def release(self, slots: CacheManager) -> None:
        """Release the slot, or those of the beams, and what a drafter has for the sequence. A session's prefix keeps
        its slot."""
        with sigint_deferred():
            for holder in self.holders():
                if holder.pinned is not None:
                    holder.pinned.keep(holder.slot, holder.computed_ids())
                else:
                    slots.release(holder.slot, holder.computed_ids())
                holder.slot = None
            if self.drafting is not None:
                self.drafting.leave(self)

    def restart(self) -> None:
        """Compute everything again after the slot was released. This changes no ids."""
        self.computed = self.start

    def read_history(self) -> History:
        """The ids so far, for penalties."""
        if self.history is None:
            self.history = History(self.prompt, self.token_ids)
        return self.history

    def ids(self, first: int, last: int) -> list[int]:
        """The ids at the positions first … last - 1, from `start` on."""
        assert first >= self.start, (first, self.start)
        if first == last - 1 == self.length - 1 and self.token_ids:
            return self.token_ids[-1:]
        first, last, prompt = first - self.start, last - self.start, len(self.prompt)
        return [*self.prompt[first:last], *self.token_ids[max(0, first - prompt) : max(0, last - prompt)]]

    def computed_ids(self) -> list[int]:
        """The ids in the slot; none if `start` is not 0, since the earlier ids are unknown."""
        return self.ids(0, self.computed) if self.start == 0 else []

    def reusable_ids(self) -> list[int]:
        """The ids whose keys and values may come from a prefix cache, and the one after them."""
        return self.ids(self.start, self.length if (first := self.missing_from) is None else first + 1)

    def replay(self, token: int) -> None:
        """Append an id that was emitted elsewhere, before any others. It ends the sequence as it did there; `deadline`
        and `cancel` apply from the next token on."""
        assert self.replayed == len(self.token_ids), "replayed ids come first"
        self.replayed += 1
        self._undelivered.append((self.replayed - 1, token, self.accept(token), False))

    def take_step(self, processed: int, tokens: abc.Sequence[Token], slots: CacheManager) -> None:
        """Take the result of a step that processed this many pending ids, and the drafts that it accepted.

        tokens: the emitted ones, of which all but the last were drafted. Those after the end of the sequence are not
            part of it. slots: the cache manager, for the beams of a search.
        """
        left = len(tokens)
        for token in tokens:
            if self.finish_reason is not None:
                break
            left -= 1
            at = len(self.token_ids)
            self._undelivered.append((at, token.id, self.accept(*token), left > 0))
        self.computed += processed
        if tokens:
            self.computed = min(self.computed + len(tokens) - 1, self.length - 1)
        if self.capture is not None:
            self.capture.commit(self.computed)

    def deliver(self) -> list[TakenToken]:
        """The tokens that no earlier call has returned, without replayed ones whose logprobs or values at taps are not
        computed yet."""
        tokens = self._undelivered
        complete = self.length if self.top_logprobs is None else len(self.logprobs)  # the number of tokens
        complete = complete if self.capture is None else min(complete, self.capture.reported)
        if not tokens or complete > tokens[-1][0]:
            self._undelivered = []
            return tokens
        count = max(0, complete - tokens[0][0])
        self._undelivered = tokens[count:]
        return tokens[:count]

    def record_step(self, seconds: float) -> None:
        """Record the time of a step, after its tokens were taken. They share it; if there are none, it counts for the
        next one."""
        new = self.decoded - len(self.lap_seconds)
        if new or self.finish_reason is None:
            self.waited += seconds
        if new:
            self.lap_seconds += [self.waited / new] * new
            self.waited = 0.0

    def accept(self, token_id: int, logprobs: TokenLogprobs | None = None) -> str:
        """Append a token and return the text that became final with it."""
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
                # An incomplete character, or the text of the eos, can complete a stop string.
                self.finish_reason, self.stopped_by = "stop", self._stream.stopped_by
        self.text += piece
        return piece

    def end(self, reason: FinishReason) -> None:
        """End the sequence between two steps, without text that is not final yet and without undelivered ids.

        An ended sequence keeps running while logprobs of its prompt or of replayed ids are missing.
        """
        assert self.finish_reason is None or self.pending, "a sequence that has ended is final"
        self.finish_reason, self.stopped_by = reason, None
        if self._undelivered:  # replayed ids without logprobs
            del self.token_ids[self._undelivered[0][0] :]
            self.text = self.text[: len(self.text) - sum(len(text) for _, _, text, _ in self._undelivered)]
            self._undelivered = []

    def reopen(self) -> None:
        """Continue after the end."""
        self.finish_reason = None

    def fork(self) -> Self:
        """An independent copy without a slot, such as a beam."""
        other = copy.copy(self)
        other.token_ids, other.logprobs = self.token_ids.copy(), self.logprobs.copy()
        other.history = None if self.history is None else self.history.fork()
        other.constraint = None if self.constraint is None else self.constraint.fork()
        other.capture = None if self.capture is None else self.capture.fork()
        other.slot, other._undelivered, other._stream = None, [], self._stream.fork()
        return other

    def take_over(self, ended: "Sequence") -> None:
        """Adopt the output of `ended`, a fork of this sequence."""
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
        return "time" if self._deadline < math.inf and time.monotonic() >= self._deadline else None
