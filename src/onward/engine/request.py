"""A request of an engine: its numbers for the scheduler, and its cache slots, which may be filled from the disk."""

import threading
import time
from collections import abc, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from onward.cache.disk import Restoration
from onward.decoding import CacheManager, FinishReason, Sequence
from onward.decoding.loop import scored_chunk
from onward.decoding.speculation.pace import LENGTHS
from onward.engine.generation import Generation, Listener
from onward.errors import ContextOverflowError
from onward.language_model import LanguageModel, Request
from onward.language_model.runner import RequestState


def needed_blocks(request: Request, slots: CacheManager) -> int:
    """The most blocks that a request takes. Samples share the prompt, but its last id; beams may share nothing.

    Raises:
        ContextOverflowError: they exceed the cache.
    """
    options, longest = request.options, request.longest
    shared = len(request.prompt) - 1 if options.beams == 1 else 0
    blocks = slots.cost(longest) + (options.rows - 1) * slots.cost(longest, shared)
    if blocks > slots.stats().total:
        raise ContextOverflowError(
            f"the request may take {options.rows} x {longest} positions, more than the engine's whole cache: "
            "ask for fewer new tokens, shorten the prompt, or give the engine more cache_memory"
        )
    return blocks


class EngineRequest(RequestState):
    """The state of a request with its generation: a `SchedulerRequest`, hashed by identity.

    emitted: the ids with which each text starts, if any. lm: whose request it is.
    priority: smaller values go first. client: the name of who asks. error: the error that ended it.
    cancel: called from any thread to end it. notify: as in `LoopNotifier.add`.
    longest_draft: how many positions past those of a step a draft may take.
    restoring: whether its slot is being filled from the disk; then it takes no part in steps.
    """

    def __init__(
        self,
        request: Request,
        emitted: abc.Sequence[abc.Sequence[int]],
        lm: LanguageModel,
        priority: int,
        client: str | None,
        slots: CacheManager,
        cancel: Callable[["EngineRequest"], None],
        notify: Callable[[list[Listener]], None],
    ) -> None:
        blocks = needed_blocks(request, slots)
        super().__init__(request, lm.tokenizer, lm.adapters)
        self.replay(emitted)
        self.priority, self.client = priority, client
        self.generation = Generation(request, partial(cancel, self), notify)
        self.error: BaseException | None = None
        self.num_sequences = request.options.rows
        self.cache_share = blocks / slots.stats().total
        draft = request.options.draft
        # Tokens that a constraint forces are drafts too.
        self.longest_draft = max(LENGTHS[-1], 0 if draft is None else draft.longest)
        self._slots, self._blocks = slots, blocks
        self._scored_chunk = scored_chunk(lm.model.vocab_size)
        self._reserved, self.restoring = 0, False
        # The positions that the texts share.
        self._shared = len(request.prompt) - 1
        self._leader = self._new_leader()

    @property
    def prompt_tokens(self) -> int:
        """The tokens to process before it decodes. Several texts share the prompt."""
        return self._shared + 1 + sum(len(text.token_ids) for text in self.sequences if text.pending)

    @property
    def max_new_tokens(self) -> int:
        return max(sequence.room for sequence in self.sequences)

    @property
    def promised_blocks(self) -> int:
        """How many of its reserved blocks it has not taken yet."""
        if not self._reserved:
            return 0
        slots = [holder.slot for sequence in self.sequences for holder in sequence.holders()]
        return max(0, self._reserved - self._slots.cost_of(slots))

    @property
    def decodes(self) -> bool:
        return self._leader is None and not self.restoring and all(row.total - row.computed == 1 for row in self.rows())

    @property
    def keeps(self) -> bool:
        """Whether it can continue with its keys and values after an update of the weights: its texts have tokens. (A
        beam search, whose tokens are not final, begins again.)"""
        return self.decodes and self.options.beams == 1 and self.has_tokens

    def begin(self, new_tokens: int, available: int) -> bool:
        """Take slots if `available` blocks suffice. new_tokens: how many to reserve for each text."""
        several, text = self.num_sequences > 1, self._first
        length = text.longest if several else min(text.length + new_tokens, text.longest)
        if (self._blocks if several else self._slots.cost(length)) > available:
            return False
        if not text.acquire(self._slots, length, self._most):
            return False
        self._reserved = self._blocks if several else 0
        if self.generation.started is None:
            self.generation.started = time.monotonic()
        return True

    @property
    def _first(self) -> Sequence:
        """The text that takes a slot first."""
        return next(text for text in self.sequences if text.pending)

    @property
    def _most(self) -> int | None:
        """How many of its ids may be reused: the others continue from there, and states do not go back far."""
        return self._shared + 1 if self._leader is not None else None

    @property
    def is_restorable(self) -> bool:
        """Whether the disk has more of the text in the new slot."""
        return getattr(self._first.slot, "stored", None) is not None

    def restoration(self, again: bool) -> Restoration | None:
        """The reading of what the disk has of its text. again: look again for cached blocks first."""
        text = self._first
        if again:
            has_slot = text.acquire(self._slots, text.reserved, self._most, instead=text.slot)
            assert has_slot, "its own room is enough"
        return self._slots.restoration(text.slot)

    def take_restored(self, restoration: Restoration) -> None:
        self._first.take_restored(self._slots.finish(restoration))

    def fork_siblings(self) -> None:
        """Start the other texts of the prompt, once it is computed up to its last id."""
        leader = self._leader
        if leader is None or not leader.has_prompt:
            return
        for sequence in self.sequences:
            if sequence is leader or not sequence.pending:
                continue
            # It may have blocks from before a preemption.
            if sequence.token_ids and sequence.acquire(self._slots, sequence.longest):
                if sequence.computed >= self._shared and self._is_reserved(leader, sequence):
                    continue
                sequence.release(self._slots)
            if not sequence.fork_slot(self._slots, leader):  # rows that cannot be copied
                has_slot = sequence.acquire(self._slots, sequence.longest)
                assert has_slot, "the blocks of all texts are reserved"
        self._leader, self._reserved = None, 0

    def _is_reserved(self, leader: Sequence, sibling: Sequence) -> bool:
        """Whether a text takes no more blocks beside its leader's than a fork. It does take more if the cached prompt
        is another request's, which computed it at the same time as the leader."""
        slots = self._slots
        more = slots.cost_of([leader.slot, sibling.slot]) - slots.cost_of([leader.slot])
        return more <= slots.cost(sibling.longest, self._shared)

    def preempt(self) -> None:
        """Release all slots. The tokens are recomputed later, with the same result."""
        for sequence in self.sequences:
            sequence.release(self._slots)
            sequence.restart()
        self._reserved = 0
        self._leader = self._new_leader()

    def release_ended(self) -> None:
        """Release the slots of texts that end before the others."""
        if self.num_sequences > 1:
            for sequence in self.sequences:
                if not sequence.pending and sequence is not self._leader:
                    sequence.release(self._slots)

    def deliver(self, seconds: float, now: float, version: int) -> int:
        """Give the generation the pieces of a step that took so long with the weights of this version, and return
        their number."""
        for text in self.sequences:
            text.record_step(seconds)
            self.error = self.error or text.error
        replayed, new = self.new_pieces(version)
        self.generation.add(replayed, None)  # they were waiting for the step's logprobs
        self.generation.add(new, now)
        return len(new)

    def end(self, reason: FinishReason | None = None) -> None:
        """Release all slots, and end the generation. reason: the finish reason of unfinished texts."""
        try:
            for sequence in self.sequences:
                sequence.release(self._slots)
                sequence.error = None  # its traceback has the sequence
            self._reserved = 0
            if self.error is None:
                if reason is not None:
                    super().end(reason)
                completion = self.completion()
        except Exception as error:
            self.error = self.error or error
        self.generation.end(completion if self.error is None else self.error)

    def _new_leader(self) -> Sequence | None:
        """The first of several unfinished texts, which processes the prompt for all; None for a single text."""
        unfinished = [sequence for sequence in self.sequences if sequence.pending]
        return unfinished[0] if len(unfinished) > 1 else None

    def rows(self) -> Iterator["Row"]:
        for sequence in () if self.restoring else self.sequences:
            pending, computed = sequence.pending, sequence.computed
            if pending and sequence.holders():
                total = self._shared if sequence is self._leader else computed + pending
                scoring = sequence.scoring_from
                if scoring is not None:  # logits of every id are large
                    total = min(total, scoring if computed < scoring else computed + self._scored_chunk)
                if total > computed:
                    yield Row(self, self.client, sequence, computed, total)


class Row(NamedTuple):
    """A running sequence, for the scheduler."""

    request: EngineRequest
    client: str | None
    sequence: Sequence
    computed: int
    total: int


class Restorer:
    """The requests whose slots are to be filled from the disk, in order, one at a time, while the others run. Only the
    engine's thread calls its methods.

    A second thread reads. Meanwhile a request has its slot and takes no part in steps. Requests that were admitted
    together often begin with the same text: each one looks again for cached blocks when its turn comes, so that only
    the first one reads it.

    wake: called by the second thread when it has read.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: deque[tuple[EngineRequest, int]] = deque()  # with the number of those read before
        self._reading: _Reading | None = None
        self._count = 0

    def __bool__(self) -> bool:
        return self._reading is not None or bool(self._waiting)

    def add(self, request: EngineRequest) -> None:
        """Restore the slot of a request that has been admitted, if the disk has more of its text."""
        if request.is_restorable:
            request.restoring = True
            self._waiting.append((request, self._count))

    def advance(self) -> None:
        """Finish what has been read, and begin the next."""
        while self._reading is None or self._reading.read.is_set():
            if self._reading is not None:
                self._finish(self._reading)
            elif self._waiting:
                self._begin(*self._waiting.popleft())
            else:
                return

    def _begin(self, request: EngineRequest, count: int) -> None:
        try:
            restoration = request.restoration(again=count < self._count)
        except Exception as error:
            request.error, restoration = error, None
        if restoration is None:
            request.restoring = False
            return
        self._reading = reading = _Reading(request, restoration)
        reading.thread = threading.Thread(
            target=reading.run, args=(self._wake,), name="onward-prefix-read", daemon=True
        )
        reading.thread.start()

    def _finish(self, reading: "_Reading") -> None:
        self._reading, request = None, reading.request
        request.restoring = False
        self._count += 1
        try:
            request.take_restored(reading.restoration)
        except Exception as error:
            request.error = error

    def cancel(self, request: EngineRequest) -> None:
        """Read nothing more for a request whose slot is about to be released."""
        if not request.restoring:
            return
        request.restoring, reading = False, self._reading
        if reading is None or reading.request is not request:
            self._waiting = deque(each for each in self._waiting if each[0] is not request)
            return
        self._reading = None
        reading.cancelled.set()
        reading.thread.join()  # after the portion that it reads


class _Reading:
    """A restoration in a thread."""

    thread: threading.Thread

    def __init__(self, request: EngineRequest, restoration: Restoration) -> None:
        self.request, self.restoration = request, restoration
        self.cancelled, self.read = threading.Event(), threading.Event()

    def run(self, wake: Callable[[], None]) -> None:
        try:
            self.restoration.read(self.cancelled.is_set)
        finally:
            self.read.set()
            wake()
