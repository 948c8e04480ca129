"""A request in an engine: what the policy asks of it, and how its sequences come and go."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from onward.decoding import BeamSearch, CacheManager, FinishReason, Sequence
from onward.decoding.loop import scored_chunk
from onward.decoding.speculation.pace import LENGTHS
from onward.engine.generation import Generation, LoopNotifier
from onward.language_model.job import RequestState


class EngineRequest:
    """A job with its generation. It is a `policy.Item`, told apart by identity.

    priority: smaller goes first. error: what made it fail. cancel: asks for its end, at any time from any thread.
    longest_draft: how many positions past those of a step a draft may take.
    """

    def __init__(
        self,
        job: RequestState,
        priority: int,
        slots: CacheManager,
        vocab_size: int,
        cancel: Callable[["EngineRequest"], None],
        watches: LoopNotifier,
    ) -> None:
        self.job, self.priority = job, priority
        self.generation = Generation(job.request, partial(cancel, self), watches)
        self.error: BaseException | None = None
        draft = job.request.options.draft
        self.longest_draft = max(LENGTHS[-1], 0 if draft is None else draft.longest)  # what is forced is drafted, too
        self._slots = slots
        self._scored_chunk = scored_chunk(vocab_size)
        self._promised = 0
        self._began = False
        self._leader = self._first_of_several()

    # ── numbers for the policy ──────────────────────────────────────────────────────────────────────────────────

    @property
    def sequences(self) -> int:
        return self.job.request.options.rows

    @property
    def prompt_tokens(self) -> int:
        """What is processed before it decodes. Several texts share the prompt."""
        return len(self.job.request.prompt) + sum(len(text.token_ids) for text in self.job.sequences if text.pending)

    @property
    def max_new_tokens(self) -> int:
        return max(sequence.room for sequence in self.job.sequences)

    @property
    def deadline(self) -> float:
        return math.inf if self.job.deadline is None else self.job.deadline

    @property
    def needed_blocks(self) -> int:
        """The most blocks that it may hold at once."""
        first = self.job.sequences[0]
        whole = self._slots.blocks_for(first.longest)
        if isinstance(first, BeamSearch):
            return first.beams.width * whole
        shared = self._slots.shared_blocks(self._shared)
        return whole + (len(self.job.sequences) - 1) * (whole - shared)

    @property
    def promised_blocks(self) -> int:
        """How many of the blocks that it may need it has not taken yet."""
        return max(0, self._promised - self._slots.blocks_of(self._held())) if self._promised else 0

    # ── coming and going ────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, new_tokens: int, available: int) -> bool:
        """Take slots, where so many blocks are there for it. new_tokens: reserve so many of each text."""
        several = self.sequences > 1
        if several and self.needed_blocks > available:
            return False
        taken: list[Sequence] = []
        for sequence in self._starting():
            length = sequence.longest if several else min(sequence.length + new_tokens, sequence.longest)
            if not several and self._slots.blocks_for(length) > available:
                return False
            if not self._acquire(sequence, length):
                for other in taken:
                    self._leave(other)
                return False
            taken.append(sequence)
        if not self._began:  # what is found after a preemption is its own
            self.job.sequences[0].cached = min(taken[0].computed, taken[0].output_at)
            self._began = True
        self._promised = self.needed_blocks if several else 0
        return True

    def fork_siblings(self) -> None:
        """Let the other texts of the prompt begin, once it is computed all but for its last id."""
        leader = self._leader
        if leader is None or leader.slot is None or leader.computed < self._shared:
            return
        for sequence in self.job.sequences:
            if sequence is leader or not sequence.pending:
                continue
            sequence.slot, sequence.computed = (
                self._slots.fork(leader.slot, self._shared, sequence.longest),
                self._shared,
            )
            if sequence.slot is None:  # rows that cannot be copied
                acquired = self._acquire(sequence, sequence.longest)
                assert acquired, "the blocks of all texts were promised"
        self._leader, self._promised = None, 0

    def _acquire(self, sequence: Sequence, length: int) -> bool:
        """Give a sequence a slot, with what is there of its text. False: there is no room."""
        ids = sequence.reusable_ids()
        if sequence is self._leader:
            del ids[self._shared + 1 :]  # others go on from what is shared, and recurrent states do not go back far
        acquired = self._slots.acquire(ids, length, reuse=sequence.scoring_from != 0, adapter=sequence.adapter)
        if acquired is None:
            return False
        sequence.slot, sequence.computed = acquired
        return True

    def preempt(self) -> None:
        """Give up all slots. What was computed is computed again later, and the tokens are the same."""
        for sequence in self.job.sequences:
            self._leave(sequence)
            sequence.restart()
        self._promised = 0
        self._leader = self._first_of_several()

    def release_ended(self) -> None:
        """Let go of the slots of texts that have ended before the others, which need theirs no more."""
        if len(self.job.sequences) > 1:
            for sequence in self.job.sequences:
                if not sequence.pending and sequence is not self._leader:
                    self._leave(sequence)

    def end(self, reason: FinishReason | None = None) -> None:
        """Let go of all slots, and tell whoever waits how it ended. reason: of texts that go on."""
        try:
            for sequence in self.job.sequences:
                self._leave(sequence)
            self._promised = 0
            if self.error is None:
                if reason is not None:
                    self.job.end(reason)
                completion = self.job.completion()
        except Exception as error:
            self.error = self.error or error
        self.generation.end(completion if self.error is None else self.error)

    def _leave(self, sequence: Sequence) -> None:
        for holder in sequence.holders():
            self._slots.release(holder.slot, holder.computed_ids())
            holder.slot = None

    def _held(self) -> list[object]:
        return [holder.slot for sequence in self.job.sequences for holder in sequence.holders()]

    def _starting(self) -> list[Sequence]:
        """The sequences that begin by themselves. The others of a prompt begin as forks of the first."""
        if self._leader is not None:
            return [self._leader]
        return [sequence for sequence in self.job.sequences if sequence.pending]

    def _first_of_several(self) -> Sequence | None:
        """The first of several texts that go on; None where there is one. It processes the prompt for all."""
        going_on = [sequence for sequence in self.job.sequences if sequence.pending]
        return going_on[0] if len(going_on) > 1 else None

    @property
    def _shared(self) -> int:
        """How many positions the texts share. Each processes the last id of the prompt itself, in one step."""
        return self.job.sequences[0].output_at - 1

    # ── at work ─────────────────────────────────────────────────────────────────────────────────────────────────

    def rows(self) -> Iterator["Row"]:
        """The sequences that can go on now."""
        for sequence in self.job.sequences:
            if sequence.pending and sequence.holders():
                total = self._shared if sequence is self._leader else sequence.computed + sequence.pending
                scoring = sequence.scoring_from
                if scoring is not None:  # logits of every id are large
                    computed = sequence.computed
                    total = min(total, scoring if computed < scoring else computed + self._scored_chunk)
                if total > sequence.computed:
                    yield Row(sequence, sequence.computed, total)


class Row(NamedTuple):
    """One sequence as the policy sees it."""

    sequence: Sequence
    computed: int
    total: int
