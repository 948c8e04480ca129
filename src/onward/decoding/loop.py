"""The decode loop. Streaming, batches, chat, speculation, user-defined forwards and the engine all run through it."""

import time
from collections import abc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from onward.decoding.batch import ScheduledSequence
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.decoding.step import Emitted, Step
from onward.errors import ContextOverflowError

# Returns the work of the next step, empty when all is done. It may admit and remove sequences.
Schedule = Callable[[], abc.Sequence[ScheduledSequence]]
# Called with a sequence that cannot continue, and the error.
Failed = Callable[[Sequence, BaseException], None]


class StepOutput(NamedTuple):
    """The output of one step.

    pieces: (sequence, token id, text that became final, whether it was drafted) for every token that a sequence
        accepted, in order.
    seconds: the duration of the step, without the time its consumer takes.
    work: the step's work.
    """

    pieces: list[tuple[Sequence, int, str, bool]]
    seconds: float
    work: abc.Sequence[ScheduledSequence]


def decode_loop(
    step: Step, schedule: Schedule, slots: CacheManager, failed: Failed | None = None
) -> Iterator[StepOutput]:
    """Run steps as long as there is work. A sequence that has ended takes no more tokens.

    failed: called for a sequence whose user-defined function raised. Without it, the loop raises.
    """
    while work := schedule():
        began = time.perf_counter()
        emitted = step(work)
        seconds = time.perf_counter() - began
        yield StepOutput(_accepted(work, emitted, slots, failed), seconds, work)
        del work, emitted  # a schedule may block for long, and must not keep ended sequences alive


def _accepted(
    work: abc.Sequence[ScheduledSequence], emitted: Emitted, slots: CacheManager, failed: Failed | None
) -> list[tuple[Sequence, int, str, bool]]:
    pieces = []
    for (sequence, _), tokens in zip(work, emitted, strict=True):
        try:
            for left, token in zip(range(len(tokens) - 1, -1, -1), tokens, strict=True):
                if sequence.finish_reason is not None:
                    break
                # The last token of a step is the model's own; those before it were drafted.
                pieces.append((sequence, token.id, sequence.accept(*token), left > 0))
        except BaseException as error:
            if failed is None:
                raise
            failed(sequence, error)
            continue
        if tokens:
            # Tokens after the end are not part of the sequence, so the cache drops them too.
            sequence.computed = min(sequence.computed, sequence.length - 1)
        if sequence.slot is not None:
            slots.advance(sequence.slot, sequence.computed, sequence.ids)
    return pieces


# Logits at every position are computed at most this many at a time: 2^26 take 256 MB in float32, 440 positions of a
# vocabulary of 152k.
_MAX_LOGITS = 2**26


def scored_chunk(vocab_size: int) -> int:
    """The most prompt ids per step if the logprobs of all are requested."""
    return max(1, _MAX_LOGITS // vocab_size)


class BatchSchedule:
    """A `Schedule` that starts all sequences at once, or as many as fit.

    siblings: for some sequences, one with the same prompt; they start from its computed positions.
    chunk: the most prompt ids of a sequence per step. vocab_size: V of the logits.
    keep: whether sequences that already have slots keep them after their end, because the caller owns these.
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
        # Without a row dimension rows cannot be copied, so nothing is gained by waiting for a sibling.
        self._siblings = {} if siblings is None or slots.whole else siblings
        self._awaited: set[Sequence] = set()  # sequences whose prompts others wait for
        self._pinned = {sequence for sequence in sequences if keep and sequence.slot is not None}

    def __call__(self) -> list[ScheduledSequence]:
        self._release_ended()
        if self._waiting:
            self._admit()
        if not self._running:
            if self._waiting:
                longest = self._waiting[0].longest
                raise ContextOverflowError(f"there is no room in the cache for a sequence of {longest} positions")
            return []
        prompts = [
            ScheduledSequence(sequence, count)
            for sequence in self._running
            if (count := self._prompt_ids(sequence)) is not None
        ]
        return prompts or [ScheduledSequence(sequence, 1) for sequence in self._running]

    def close(self) -> None:
        """Release all slots. The garbage collector closes an abandoned stream."""
        for sequence in self._running:
            self._release(sequence, self._slots.release_later)
        self._running = []

    def _prompt_ids(self, sequence: Sequence) -> int | None:
        """The number of prompt ids to process next; None if the sequence decodes or waits for others."""
        pending = sequence.pending
        if sequence in self._awaited:
            # The last id is processed together with those of the sequences that share the prompt.
            pending -= 1
            return self._max_chunk(sequence, pending) if pending else None
        return self._max_chunk(sequence, pending) if pending > 1 or not sequence.has_begun else None

    def _max_chunk(self, sequence: Sequence, pending: int) -> int:
        chunk = self._chunk if sequence.prompt_top is None else self._scored_chunk
        return self._slots.max_chunk(sequence.slot, sequence.computed, min(pending, chunk))

    def _admit(self) -> None:
        """Give slots to waiting sequences, in order, as long as there is room."""
        waiting: list[Sequence] = []
        is_full = False
        for sequence in self._waiting:
            if is_full or self._awaits_prompt(sequence):
                waiting.append(sequence)
            elif sequence in self._pinned or self._fork(sequence) or self._acquire(sequence):
                self._running.append(sequence)
            else:
                is_full = True
                waiting.append(sequence)
        self._waiting = waiting
        self._awaited = {self._siblings[sequence] for sequence in waiting if sequence in self._siblings}

    def _awaits_prompt(self, sequence: Sequence) -> bool:
        """Whether a sibling still has to compute the prompt, all but its last id."""
        sibling = self._siblings.get(sequence)
        if sibling is None or sibling.finish_reason is not None:
            return False
        return sibling.slot is None or sibling.computed < sibling.output_at - 1

    def _acquire(self, sequence: Sequence) -> bool:
        acquired = self._slots.acquire(
            sequence.prompt,
            sequence.longest,
            reuse=sequence.prompt_top is None and not sequence.start,
            adapter=sequence.adapter,
        )
        if acquired is None:
            return False
        sequence.slot, sequence.cached = acquired
        sequence.computed += sequence.cached
        return True

    def _fork(self, sequence: Sequence) -> bool:
        sibling = self._siblings.get(sequence)
        if sibling is None or sibling.slot is None:
            return False
        computed = sibling.output_at - 1  # every sequence processes the last prompt id itself
        sequence.slot = self._slots.fork(sibling.slot, computed, sequence.longest)
        if sequence.slot is None:
            return False
        sequence.computed = computed
        return True

    def _release_ended(self) -> None:
        running = []
        for sequence in self._running:
            if sequence.pending:
                running.append(sequence)
            else:
                self._release(sequence, self._slots.release)
        self._running = running

    def _release(self, sequence: Sequence, release: Callable[[Any, list[int]], None]) -> None:
        if sequence in self._pinned:
            return
        for holder in sequence.holders():
            release(holder.slot, holder.computed_ids())
            holder.slot = None
