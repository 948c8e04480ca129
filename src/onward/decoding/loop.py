"""The one loop. Streaming, batches, chat, speculation, forwards of the user's own and the engine all run through it."""

import time
from collections import abc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from onward.decoding.batch import ScheduledSequence
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.decoding.step import Emitted, Step
from onward.errors import ContextOverflowError

# The work of the next step; none when all is done. It may admit sequences and remove them.
Schedule = Callable[[], abc.Sequence[ScheduledSequence]]
# Is told of a sequence that cannot go on, and why.
Failed = Callable[[Sequence, BaseException], None]


class StepOutput(NamedTuple):
    """What one step emitted.

    pieces: (sequence, token id, text that became final, whether it was drafted) for every token that a sequence
        accepted, in order.
    seconds: the time of the step, without the time of whoever consumes its emission.
    work: what the step did.
    """

    pieces: list[tuple[Sequence, int, str, bool]]
    seconds: float
    work: abc.Sequence[ScheduledSequence]


def decode_loop(
    step: Step, schedule: Schedule, slots: CacheManager, failed: Failed | None = None
) -> Iterator[StepOutput]:
    """Step as long as there is work.

    Sequences alone say whether they have ended, and one that has ended takes no more tokens.

    failed: is told of a sequence that could not take its token, because a function of the user's raised. Without it
        the loop raises.
    """
    while work := schedule():
        began = time.perf_counter()
        emitted = step(work)
        seconds = time.perf_counter() - began
        yield StepOutput(_accepted(work, emitted, slots, failed), seconds, work)
        del work, emitted  # a schedule may wait for long, and must not keep ended sequences alive


def _accepted(
    work: abc.Sequence[ScheduledSequence], emitted: Emitted, slots: CacheManager, failed: Failed | None
) -> list[tuple[Sequence, int, str, bool]]:
    """Give each sequence its tokens, and tell the cache how far each text is computed."""
    pieces = []
    for (sequence, _), tokens in zip(work, emitted, strict=True):
        try:
            for left, token in zip(range(len(tokens) - 1, -1, -1), tokens, strict=True):
                if sequence.finish_reason is not None:
                    break
                # A step ends with the token that the model chose; those before it were drafted.
                pieces.append((sequence, token.id, sequence.accept(*token), left > 0))
        except BaseException as error:
            if failed is None:
                raise
            failed(sequence, error)
            continue
        if tokens:
            # The step's tokens after the end are not part of the text, so the cache drops them too.
            sequence.computed = min(sequence.computed, sequence.length - 1)
        if sequence.slot is not None:
            slots.advance(sequence.slot, sequence.computed, sequence.ids)
    return pieces


# The most logits computed at once where they are needed at every position: 2^26 take 256 MB in float32, which are 440
# positions of a vocabulary of 152k.
_MOST_LOGITS = 2**26


def scored_chunk(vocab_size: int) -> int:
    """The most ids of a prompt that a step processes where the logprobs of all are asked for."""
    return max(1, _MOST_LOGITS // vocab_size)


class BatchSchedule:
    """A `Schedule` that begins with all sequences at once, or with as many as there is room for.

    sequences: those to run. siblings: for some of them one of the same prompt; they begin with what that one computed.
    chunk: the most prompt ids of a sequence that a step processes. vocab_size: V of the logits.
    keep: whether sequences that have slots keep them after their end, for somebody else holds these.
    """

    def __init__(
        self,
        slots: CacheManager,
        sequences: abc.Sequence[Sequence],
        chunk: int = 512,
        *,
        vocab_size: int = 0,
        siblings: abc.Mapping[Sequence, Sequence] | None = None,
        keep: bool = False,
    ) -> None:
        self._slots = slots
        self._waiting = [sequence for sequence in sequences if sequence.pending]
        self._running: list[Sequence] = []
        self._chunk = chunk
        scored = sum(sequence.prompt_top is not None for sequence in self._waiting)
        self._scored_chunk = min(chunk, scored_chunk(scored * vocab_size)) if scored * vocab_size else chunk
        # Rows that do not show cannot be copied, so nothing is gained by waiting for a sibling.
        self._siblings = {} if siblings is None or slots.whole else siblings
        self._first: set[Sequence] = set()  # whose prompts others wait for
        self._kept = {sequence for sequence in sequences if keep and sequence.slot is not None}

    def __call__(self) -> list[ScheduledSequence]:
        self._let_go()
        if self._waiting:
            self._begin()
        if not self._running:
            if self._waiting:
                longest = self._waiting[0].longest
                raise ContextOverflowError(f"there is no room in the cache for a text of {longest} positions")
            return []
        prompts = [
            ScheduledSequence(sequence, count)
            for sequence in self._running
            if (count := self._prompt_ids(sequence)) is not None
        ]
        return prompts or [ScheduledSequence(sequence, 1) for sequence in self._running]

    def close(self) -> None:
        """Let go of all slots. A stream that nobody holds any more is closed by the garbage collector."""
        for sequence in self._running:
            self._release(sequence, self._slots.release_later)
        self._running = []

    def _prompt_ids(self, sequence: Sequence) -> int | None:
        """How many ids of its prompt a sequence processes next; None where it decodes or waits for others."""
        pending = sequence.pending
        if sequence in self._first:
            # The last id is processed together with those of the texts that share the prompt.
            pending -= 1
            return self._piece(sequence, pending) if pending else None
        return self._piece(sequence, pending) if pending > 1 or not sequence.has_begun else None

    def _piece(self, sequence: Sequence, pending: int) -> int:
        most = self._chunk if sequence.prompt_top is None else self._scored_chunk
        return self._slots.max_chunk(sequence.slot, sequence.computed, min(pending, most))

    def _begin(self) -> None:
        """Give slots to those that wait, in order, as long as there is room."""
        waiting: list[Sequence] = []
        is_full = False
        for sequence in self._waiting:
            if is_full or self._awaits_prompt(sequence):
                waiting.append(sequence)
            elif not self._starts(sequence):
                is_full = True
                waiting.append(sequence)
        self._waiting = waiting
        self._first = {self._siblings[sequence] for sequence in waiting if sequence in self._siblings}

    def _awaits_prompt(self, sequence: Sequence) -> bool:
        """Whether a sibling is still to compute the prompt, all but its last id."""
        sibling = self._siblings.get(sequence)
        if sibling is None or sibling.finish_reason is not None:
            return False
        return sibling.slot is None or sibling.computed < sibling.output_at - 1

    def _starts(self, sequence: Sequence) -> bool:
        """Give a sequence a slot. False: there is no room."""
        if sequence not in self._kept and not (self._forks(sequence) or self._acquires(sequence)):
            return False
        self._running.append(sequence)
        return True

    def _acquires(self, sequence: Sequence) -> bool:
        acquired = self._slots.acquire(
            sequence.prompt,
            sequence.longest,
            reuse=sequence.prompt_top is None and not sequence.start,
            adapter=sequence.adapter,
        )
        if acquired is None:
            return False
        sequence.slot, reused = acquired
        sequence.cached = reused
        sequence.computed += reused
        return True

    def _forks(self, sequence: Sequence) -> bool:
        """Begin with what a sibling has computed of the prompt."""
        sibling = self._siblings.get(sequence)
        if sibling is None or sibling.slot is None:
            return False
        computed = sibling.output_at - 1  # all texts of the prompt process the last id again
        sequence.slot = self._slots.fork(sibling.slot, computed, sequence.longest)
        if sequence.slot is None:
            return False
        sequence.computed = computed
        return True

    def _let_go(self) -> None:
        running = []
        for sequence in self._running:
            if sequence.pending:
                running.append(sequence)
            else:
                self._release(sequence, self._slots.release)
        self._running = running

    def _release(self, sequence: Sequence, release: Callable[[Any, list[int]], None]) -> None:
        if sequence in self._kept:
            return
        for holder in sequence.holders():
            release(holder.slot, holder.computed_ids())
            holder.slot = None
