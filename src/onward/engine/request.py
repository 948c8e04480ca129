"""A request in an engine: its numbers for the scheduler, and the cache slots of its sequences."""

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
    """A `RequestState` with its generation: a `SchedulerRequest`, hashed by identity.

    priority: smaller values go first. client: the name of who asks. error: the error that ended it.
    cancel: called from any thread to end it.
    longest_draft: how many positions past those of a step a draft may take.
    """

    def __init__(
        self,
        job: RequestState,
        priority: int,
        client: str | None,
        slots: CacheManager,
        vocab_size: int,
        cancel: Callable[["EngineRequest"], None],
        notifier: LoopNotifier,
    ) -> None:
        self.job, self.priority, self.client = job, priority, client
        self.generation = Generation(job.request, partial(cancel, self), notifier)
        self.error: BaseException | None = None
        draft = job.request.options.draft
        self.longest_draft = max(
            LENGTHS[-1], 0 if draft is None else draft.longest
        )  # tokens that a constraint forces are drafts too
        self._slots = slots
        self._scored_chunk = scored_chunk(vocab_size)
        self._reserved = 0
        self._started = False
        self._leader = self._new_leader()

    @property
    def sequences(self) -> int:
        return self.job.request.options.rows

    @property
    def prompt_tokens(self) -> int:
        """The tokens to process before it decodes. Several texts share the prompt."""
        return len(self.job.request.prompt) + sum(len(text.token_ids) for text in self.job.sequences if text.pending)

    @property
    def max_new_tokens(self) -> int:
        return max(sequence.room for sequence in self.job.sequences)

    @property
    def deadline(self) -> float:
        return math.inf if self.job.deadline is None else self.job.deadline

    @property
    def needed_blocks(self) -> int:
        first = self.job.sequences[0]
        blocks = self._slots.blocks_for(first.longest)
        if isinstance(first, BeamSearch):
            return first.beams.width * blocks
        shared = self._slots.shared_blocks(self._shared)
        return blocks + (len(self.job.sequences) - 1) * (blocks - shared)

    @property
    def cache_share(self) -> float:
        return self.needed_blocks / self._slots.total

    @property
    def promised_blocks(self) -> int:
        """How many of its reserved blocks it has not taken yet."""
        if not self._reserved:
            return 0
        slots = [holder.slot for sequence in self.job.sequences for holder in sequence.holders()]
        return max(0, self._reserved - self._slots.blocks_of(slots))

    @property
    def decodes(self) -> bool:
        return self._leader is None and all(row.total - row.computed == 1 for row in self.rows())

    def begin(self, new_tokens: int, available: int) -> bool:
        """Take slots if `available` blocks suffice. new_tokens: how many to reserve for each text."""
        several = self.sequences > 1
        if several and self.needed_blocks > available:
            return False
        acquired: list[Sequence] = []
        # With several texts, all but the leader start as its forks.
        starting = [text for text in self.job.sequences if text.pending] if self._leader is None else [self._leader]
        for sequence in starting:
            length = sequence.longest if several else min(sequence.length + new_tokens, sequence.longest)
            if not several and self._slots.blocks_for(length) > available:
                return False
            if not self._acquire(sequence, length):
                for other in acquired:
                    self._leave(other)
                return False
            acquired.append(sequence)
        if not self._started:  # after a preemption it would find its own blocks
            self.job.sequences[0].cached = min(acquired[0].computed, acquired[0].output_at)
            self._started = True
        self._reserved = self.needed_blocks if several else 0
        return True

    def fork_siblings(self) -> None:
        """Start the other texts of the prompt, once it is computed up to its last id."""
        leader = self._leader
        if leader is None or leader.slot is None or leader.computed < self._shared:
            return
        for sequence in self.job.sequences:
            if sequence is leader or not sequence.pending:
                continue
            if sequence.token_ids and self._acquire(sequence, sequence.longest):  # its blocks from before a preemption
                if sequence.computed >= self._shared:
                    continue
                self._leave(sequence)
            sequence.slot = self._slots.fork(leader.slot, self._shared, sequence.longest)
            sequence.computed = self._shared
            if sequence.slot is None:  # rows that cannot be copied
                has_slot = self._acquire(sequence, sequence.longest)
                assert has_slot, "the blocks of all texts are reserved"
        self._leader, self._reserved = None, 0

    def _acquire(self, sequence: Sequence, length: int) -> bool:
        """Give a sequence a slot with the cached prefix of its text. False: there is no room."""
        ids = sequence.reusable_ids()
        if sequence is self._leader:
            del ids[self._shared + 1 :]  # the others continue from here, and recurrent states do not go back far
        acquired = self._slots.acquire(ids, length, reuse=sequence.scoring_from != 0, adapter=sequence.adapter)
        if acquired is None:
            return False
        sequence.slot, sequence.computed = acquired
        return True

    def preempt(self) -> None:
        """Release all slots. The tokens are recomputed later, with the same result."""
        for sequence in self.job.sequences:
            self._leave(sequence)
            sequence.restart()
        self._reserved = 0
        self._leader = self._new_leader()

    def release_ended(self) -> None:
        """Release the slots of texts that end before the others."""
        if len(self.job.sequences) > 1:
            for sequence in self.job.sequences:
                if not sequence.pending and sequence is not self._leader:
                    self._leave(sequence)

    def end(self, reason: FinishReason | None = None) -> None:
        """Release all slots, and end the generation. reason: the finish reason of unfinished texts."""
        try:
            for sequence in self.job.sequences:
                self._leave(sequence)
            self._reserved = 0
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

    def _new_leader(self) -> Sequence | None:
        """The first of several unfinished texts, which processes the prompt for all; None for a single text."""
        unfinished = [sequence for sequence in self.job.sequences if sequence.pending]
        return unfinished[0] if len(unfinished) > 1 else None

    @property
    def _shared(self) -> int:
        """The number of positions that the texts share. Each processes the prompt's last id itself, in one step."""
        return self.job.sequences[0].output_at - 1

    def rows(self) -> Iterator["Row"]:
        for sequence in self.job.sequences:
            if sequence.pending and sequence.holders():
                total = self._shared if sequence is self._leader else sequence.computed + sequence.pending
                scoring = sequence.scoring_from
                if scoring is not None:  # logits of every id are large
                    computed = sequence.computed
                    total = min(total, scoring if computed < scoring else computed + self._scored_chunk)
                if total > sequence.computed:
                    yield Row(sequence, sequence.computed, total, self.client)


class Row(NamedTuple):
    sequence: Sequence
    computed: int
    total: int
    client: str | None
