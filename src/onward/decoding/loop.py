"""The decode loop. Streaming, batches, chat, speculation, user-defined forwards and the engine all run through it."""

import sys
import time
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import closing

from onward.cache.disk import Restoration
from onward.decoding.batch import ScheduledSequence
from onward.decoding.beam import BeamStep
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.decoding.speculation.drafter import DraftTarget
from onward.decoding.speculation.pace import LENGTHS
from onward.decoding.speculation.speculator import Speculator
from onward.decoding.speculation.step import SpeculativeStep
from onward.decoding.step import DecodeStep, Emitted, SamplerCache, Step
from onward.errors import ContextOverflowError
from onward.models import Run
from onward.util.process import sigint_deferred

# Returns the work of the next step, empty when all is done. It may admit and remove sequences.
Schedule = Callable[[], abc.Sequence[ScheduledSequence]]


def decode_loop(step: Step, schedule: Schedule, slots: CacheManager, *, isolates: bool = False) -> Iterator[float]:
    """Run steps as long as there is work, and yield the seconds of each, without the time that the consumer takes.

    The sequences hold the new tokens (`Sequence.deliver`). One that has ended takes no more tokens.

    isolates: record an exception of a sequence's function as its `error`; otherwise the loop raises it.
    """
    while work := schedule():
        began = time.perf_counter()
        emitted = step(work)
        seconds = time.perf_counter() - began
        _take(work, emitted, slots, isolates)
        del work, emitted  # a schedule may block for long, and must not keep ended sequences alive
        yield seconds


def _take(work: abc.Sequence[ScheduledSequence], emitted: Emitted, slots: CacheManager, isolates: bool) -> None:
    for (sequence, count), tokens in zip(work, emitted, strict=True):
        if sequence.error is not None:  # its step failed
            continue
        try:
            sequence.take_step(count, tokens, slots)
        except BaseException as error:
            if not isolates:
                raise
            sequence.error = error
            continue
        for holder in (sequence,) if sequence.slot is not None else sequence.holders():
            slots.commit(holder.slot, holder.computed, holder.ids)


def run_to_end(
    step: Step, slots: CacheManager, sequences: abc.Sequence[Sequence], chunk: int = 512, *, vocab_size: int = 0
) -> None:
    """Run sequences until all have ended; they collect their results. The arguments are those of `BatchSchedule`."""
    with closing(BatchSchedule(slots, sequences, chunk, vocab_size=vocab_size)) as schedule:
        for _ in decode_loop(step, schedule, slots):
            pass


class StepRouter:
    """A `Step` that runs each sequence with its kind of step: plain, beam search, or speculative with its drafter.

    Sequences of one kind run together. If any sequence without a draft has a constraint, all of them run with a step
    that drafts the tokens that constraints force.

    isolates: when a step fails, run its halves, until the failing sequence is alone, and record the exception as its
        `error`. The tokens of the others are the same. Otherwise the step raises.
    rows, max_len: the most sequences at once, and the most positions of each; a draft model's cache is made for them.
    """

    def __init__(self, run: Run, slots: CacheManager, *, rows: int, max_len: int, isolates: bool = False) -> None:
        self._model, self._isolates, self._rows, self._max_len = run.model, isolates, rows, max_len
        device = run.model.device
        self._plain = DecodeStep(run, slots, SamplerCache(device), device)
        self._beams = BeamStep(self._plain)
        target = DraftTarget(run.model.vocab_size, device, rows, max_len, rows * max_len, LENGTHS[-1])
        self._forced = SpeculativeStep(self._plain, SamplerCache(device), target)
        self._speculative: weakref.WeakKeyDictionary[Speculator, SpeculativeStep] = weakref.WeakKeyDictionary()

    def join(self, sequences: abc.Sequence[Sequence], draft: Speculator | None) -> None:
        """Choose the step of these sequences. draft: the drafter of all of them. Preempted sequences join again, and
        keep the counts of their drafts."""
        step, drafted = self._forced, sequences
        if draft is None:
            for sequence in sequences:
                sequence.step = None if sequence.streams else self._beams
            drafted = [sequence for sequence in sequences if sequence.streams and sequence.constraint is not None]
        elif draft in self._speculative:
            step = self._speculative[draft]
        else:
            sampler = SamplerCache(self._model.device)
            step = draft.step(self._plain, sampler, self._model, rows=self._rows, max_len=self._max_len)
            self._speculative[draft] = step
        step.join(drafted)

    def by_kind(self, work: abc.Sequence[ScheduledSequence]) -> list[tuple[Step, abc.Sequence[int]]]:
        """Divide work by kind: steps with the indices of their items."""
        first = work[0].sequence.step
        if all(sequence.step is first for sequence, _ in work):
            return [(first or self._plain, range(len(work)))]
        kinds: dict[Step, list[int]] = {}
        for index, (sequence, _) in enumerate(work):
            kinds.setdefault(sequence.step or self._plain, []).append(index)
        if self._forced in kinds and self._plain in kinds:
            kinds[self._forced] = sorted([*kinds[self._forced], *kinds.pop(self._plain)])
        return list(kinds.items())

    def __call__(self, work: abc.Sequence[ScheduledSequence]) -> Emitted:
        kinds = self.by_kind(work)
        if len(kinds) == 1:
            return self._tried(kinds[0][0], work)
        emitted: Emitted = [[] for _ in work]
        for step, indices in kinds:
            for index, tokens in zip(indices, self._tried(step, [work[at] for at in indices]), strict=True):
                emitted[index] = tokens
        return emitted

    def _tried(self, step: Step, work: abc.Sequence[ScheduledSequence]) -> Emitted:
        try:
            return step(work)
        except BaseException as error:
            if not self._isolates:
                raise
            if len(work) == 1:
                work[0].sequence.error = error
                return [[]]
            half = len(work) // 2
            return [*self._tried(step, work[:half]), *self._tried(step, work[half:])]


# Logits at every position are computed at most this many at a time: 2^26 take 256 MB in float32, 440 positions of a
# vocabulary of 152k.
_MAX_LOGITS = 2**26
# So many ids without logits run before the others: their part of the head takes longer than a pass over the weights.
_MIN_UNSCORED = 64


def scored_chunk(vocab_size: int) -> int:
    """The most ids per step if the logits after all of them are needed."""
    return max(1, _MAX_LOGITS // vocab_size)


class BatchSchedule:
    """A `Schedule` that starts all sequences at once, or as many as fit.

    Sequences with a `leader` start from its computed positions.

    chunk: the most prompt ids of a sequence per step. vocab_size: V of the logits; 0 if no step needs all of them.
    """

    def __init__(
        self, slots: CacheManager, sequences: abc.Sequence[Sequence], chunk: int = 512, *, vocab_size: int = 0
    ) -> None:
        self._slots = slots
        self._waiting = [sequence for sequence in sequences if sequence.pending]
        self._running: list[Sequence] = []
        self._chunk = chunk
        scored = sum(sequence.scoring_from is not None for sequence in self._waiting)
        self._scored_chunk = min(chunk, scored_chunk(scored * vocab_size)) if scored * vocab_size else chunk

    def __call__(self) -> list[ScheduledSequence]:
        self._release_ended()
        while self._waiting:
            with sigint_deferred():  # or a slot could be lost before its sequence has it
                restoration = self._admit()
            if restoration is None:
                break
            sequence = self._running[-1]  # those after it may begin with what it reads
            restoration.read()
            sequence.take_restored(self._slots.finish(restoration))
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

    def close(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Release all slots. The garbage collector closes an abandoned stream, also while the interpreter exits, when
        modules have lost their globals."""
        if is_exiting():
            return
        for sequence in self._running:
            sequence.release(self._slots)
        self._running = []

    def _prompt_ids(self, sequence: Sequence) -> int | None:
        """The number of prompt ids to process next; None if the sequence decodes or waits for others."""
        pending = sequence.pending
        if self._waiting and any(other.leader is sequence for other in self._waiting):
            # The last id is processed together with those of the sequences that share the prompt.
            pending -= 1
            return self._max_chunk(sequence, pending) if pending else None
        return self._max_chunk(sequence, pending) if pending > 1 or not sequence.has_begun else None

    def _max_chunk(self, sequence: Sequence, pending: int) -> int:
        chunk, first = self._chunk, sequence.scoring_from
        if first is not None and (unscored := first - sequence.computed) >= _MIN_UNSCORED:
            chunk = min(chunk, unscored)
        elif first is not None:
            chunk = self._scored_chunk
        return self._slots.max_chunk(sequence.slot, sequence.computed, min(pending, chunk))

    def _admit(self) -> Restoration | None:
        """Give slots to waiting sequences, in order, as long as there is room, and none has something to read."""
        waiting: list[Sequence] = []
        is_full, restoration = False, None
        for sequence in self._waiting:
            # Without a row dimension rows cannot be copied, so nothing is gained by waiting for the leader's prompt.
            leader = None if self._slots.whole else sequence.leader
            if (
                is_full
                or restoration is not None
                or (leader is not None and leader.finish_reason is None and not leader.has_prompt)
            ):
                waiting.append(sequence)
            elif leader is not None and leader.has_prompt and sequence.fork_slot(self._slots, leader):
                self._running.append(sequence)
            elif sequence.acquire(self._slots, sequence.longest):
                self._running.append(sequence)
                restoration = self._slots.restoration(sequence.slot)
            else:
                is_full = True
                waiting.append(sequence)
        self._waiting = waiting
        return restoration

    def _release_ended(self) -> None:
        running = []
        for sequence in self._running:
            if sequence.pending:
                running.append(sequence)
            else:
                sequence.release(self._slots)
        self._running = running
