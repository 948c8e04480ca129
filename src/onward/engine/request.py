"""One request of an engine: its `Generation` for callers in threads and asyncio, and its numbers for the scheduler."""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from onward.decoding import CacheManager, FinishReason, Sequence
from onward.decoding.loop import scored_chunk
from onward.decoding.speculation.pace import LENGTHS
from onward.errors import ContextOverflowError, EngineError
from onward.language_model import Completion, Piece, Request
from onward.language_model.runner import RequestState
from onward.util.process import renew_in_forks


class Listener(NamedTuple):
    """A callback `changed` in an asyncio loop. pieces: call it for new pieces too, not only for the end."""

    loop: asyncio.AbstractEventLoop
    changed: Callable[[], None]
    pieces: bool


class Generation:
    """A request that an engine serves. It ends exactly once, with a `Completion` or with an error.

        for piece in generation: …        # the pieces as they come, from the first on
        completion = generation.result()

        async for piece in generation: …
        completion = await generation

    Any number of threads and tasks may wait for it.

    request: the prompt with all options.
    submitted: the time of submission, on the clock `time.monotonic`.
    started: when it first left the queue, on the same clock; None before.
    arrivals: (time, number of tokens) of each step that brought tokens, on the same clock.
    """

    def __init__(self, request: Request, cancel: Callable[[], None], notify: Callable[[list[Listener]], None]) -> None:
        self.request = request
        self.submitted = time.monotonic()
        self.started: float | None = None
        self.arrivals: list[tuple[float, int]] = []
        self._cancel: Callable[[], None] | None = cancel  # None after the end, so that no engine is kept alive
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._notify = notify  # when the step is over
        self._listeners: list[Listener] = []
        renew_in_forks(self)

    def __repr__(self) -> str:
        state = "running" if not self.done else "failed" if self._error is not None else "done"
        return f"Generation({len(self._pieces)} tokens, {state})"

    @property
    def done(self) -> bool:
        return self._completion is not None or self._error is not None

    def cancel(self) -> None:
        """End it with the next step, with `finish_reason` "cancelled". Does nothing after the end."""
        if (cancel := self._cancel) is not None:
            cancel()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end and return the completion. timeout: seconds.

        Raises:
            TimeoutError: it has not ended by then. It continues.
            OnwardError: the error that ended the request.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the generation has not ended within {timeout} s")
        return self._ended()

    def __iter__(self) -> Iterator[Piece]:
        """All pieces, as they arrive. Raises the error that ended the request."""
        at = 0
        while True:
            with self._changed:
                while not self._has_more(at):
                    self._changed.wait()
                new = self._pieces[at:]
            if not new:
                self._ended()
                return
            at += len(new)
            yield from new

    @property
    def tokens(self) -> int:
        """The number of pieces so far."""
        return len(self._pieces)

    def pieces(self, start: int = 0) -> list[Piece]:
        """The pieces so far, from index `start` on."""
        return self._pieces[start:]

    def emitted(self) -> list[list[int]]:
        """The ids so far, a list for each text, for `Engine.resume`."""
        ids: list[list[int]] = [[] for _ in range(self.request.options.n)]
        for piece in self.pieces():
            ids[piece.choice].append(piece.token_id)
        return ids

    def watch(self, changed: Callable[[], None], *, pieces: bool = True) -> Callable[[], None]:
        """Call `changed()` in the running asyncio loop after each step that brings pieces, and after the end.

        Each step makes one call into a loop for all generations together. Earlier pieces are not reported, so look for
        them after this call; an earlier end is. pieces: False reports the end only.

        Returns:
            A function that removes the callback.
        """
        listener = Listener(asyncio.get_running_loop(), changed, pieces)
        with self._changed:
            self._listeners.append(listener)
            if self.done:
                listener.loop.call_soon(changed)

        def end() -> None:
            with self._changed, suppress(ValueError):
                self._listeners.remove(listener)

        return end

    async def __aiter__(self) -> AsyncIterator[Piece]:
        at = 0
        while True:
            await self._until(at)
            new = self._pieces[at:]
            if not new:
                self._ended()
                return
            at += len(new)
            for piece in new:
                yield piece

    def __await__(self) -> Generator[None, None, Completion]:
        yield from self._until().__await__()
        return self._ended()

    async def _until(self, at: int | None = None) -> None:
        """Wait in this task's loop for the end, or for piece number `at` if that comes first."""
        changed = asyncio.Event()
        end = self.watch(changed.set, pieces=at is not None)
        try:
            while not self._has_more(at):
                await changed.wait()
                changed.clear()
        finally:
            end()

    def _has_more(self, at: int | None) -> bool:
        return self.done or (at is not None and len(self._pieces) > at)

    def _ended(self) -> Completion:
        if self._error is not None:
            raise self._error
        assert self._completion is not None, "it has ended"
        return self._completion

    def renew(self) -> None:
        """In a forked child: make a new lock. No more pieces will come."""
        self._changed, self._listeners, self._cancel = threading.Condition(), [], None
        if not self.done:
            self._error = EngineError(
                "this request is served in the parent process: submit it to an engine in this one"
            )

    def add(self, pieces: list[Piece], now: float | None) -> None:
        """Add pieces; listeners are called when the step is over. now: None for tokens that no step brought."""
        if not pieces:
            return
        with self._changed:
            self._pieces += pieces
            if now is not None:
                self.arrivals.append((now, len(pieces)))
            self._changed.notify_all()
            self._notify([listener for listener in self._listeners if listener.pieces])

    def end(self, outcome: Completion | BaseException) -> None:
        """outcome: the completion, or the error that ended the request."""
        with self._changed:
            assert not self.done, "a generation ends once"
            if isinstance(outcome, BaseException):
                self._error = outcome
            else:
                self._completion = outcome
            self._cancel = None
            self._changed.notify_all()
            self._notify(self._listeners)


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


class EngineRequest:
    """A `RequestState` with its generation: a `SchedulerRequest`, hashed by identity.

    priority: smaller values go first. client: the name of who asks. error: the error that ended it.
    blocks: its `needed_blocks`. cancel: called from any thread to end it. notify: as in `LoopNotifier.add`.
    longest_draft: how many positions past those of a step a draft may take.
    """

    def __init__(
        self,
        state: RequestState,
        priority: int,
        client: str | None,
        slots: CacheManager,
        blocks: int,
        vocab_size: int,
        cancel: Callable[["EngineRequest"], None],
        notify: Callable[[list[Listener]], None],
    ) -> None:
        self.state, self.priority, self.client = state, priority, client
        self.generation = Generation(state.request, partial(cancel, self), notify)
        self.error: BaseException | None = None
        self.sequences = state.request.options.rows
        self.deadline = math.inf if state.deadline is None else state.deadline
        self.cache_share = blocks / slots.stats().total
        draft = state.request.options.draft
        # Tokens that a constraint forces are drafts too.
        self.longest_draft = max(LENGTHS[-1], 0 if draft is None else draft.longest)
        self._slots, self._blocks = slots, blocks
        self._scored_chunk = scored_chunk(vocab_size)
        self._reserved = 0
        # The positions that the texts share.
        self._shared = len(state.request.prompt) - 1
        self._leader = self._new_leader()

    @property
    def prompt_tokens(self) -> int:
        """The tokens to process before it decodes. Several texts share the prompt."""
        return self._shared + 1 + sum(len(text.token_ids) for text in self.state.sequences if text.pending)

    @property
    def max_new_tokens(self) -> int:
        return max(sequence.room for sequence in self.state.sequences)

    @property
    def promised_blocks(self) -> int:
        """How many of its reserved blocks it has not taken yet."""
        if not self._reserved:
            return 0
        slots = [holder.slot for sequence in self.state.sequences for holder in sequence.holders()]
        return max(0, self._reserved - self._slots.cost_of(slots))

    @property
    def decodes(self) -> bool:
        return self._leader is None and all(row.total - row.computed == 1 for row in self.rows())

    def begin(self, new_tokens: int, available: int) -> bool:
        """Take slots if `available` blocks suffice. new_tokens: how many to reserve for each text."""
        several = self.sequences > 1
        # With several texts, all but the first start as its forks.
        text = next(text for text in self.state.sequences if text.pending)
        length = text.longest if several else min(text.length + new_tokens, text.longest)
        if (self._blocks if several else self._slots.cost(length)) > available:
            return False
        # The others continue from there, and recurrent states do not go back far.
        if not text.acquire(self._slots, length, self._shared + 1 if text is self._leader else None):
            return False
        self._reserved = self._blocks if several else 0
        if self.generation.started is None:
            self.generation.started = time.monotonic()
        return True

    def fork_siblings(self) -> None:
        """Start the other texts of the prompt, once it is computed up to its last id."""
        leader = self._leader
        if leader is None or not leader.has_prompt:
            return
        for sequence in self.state.sequences:
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
        for sequence in self.state.sequences:
            sequence.release(self._slots)
            sequence.restart()
        self._reserved = 0
        self._leader = self._new_leader()

    def release_ended(self) -> None:
        """Release the slots of texts that end before the others."""
        if self.sequences > 1:
            for sequence in self.state.sequences:
                if not sequence.pending and sequence is not self._leader:
                    sequence.release(self._slots)

    def deliver(self, seconds: float, now: float) -> int:
        """Give the generation the pieces of a step that took so long, and return their number."""
        for text in self.state.sequences:
            text.record_step(seconds)
            self.error = self.error or text.error
        replayed, new = self.state.new_pieces()
        self.generation.add(replayed, None)  # they were waiting for the step's logprobs
        self.generation.add(new, now)
        return len(new)

    def end(self, reason: FinishReason | None = None) -> None:
        """Release all slots, and end the generation. reason: the finish reason of unfinished texts."""
        try:
            for sequence in self.state.sequences:
                sequence.release(self._slots)
                sequence.error = None  # its traceback has the sequence
            self._reserved = 0
            if self.error is None:
                if reason is not None:
                    self.state.end(reason)
                completion = self.state.completion()
        except Exception as error:
            self.error = self.error or error
        self.generation.end(completion if self.error is None else self.error)

    def _new_leader(self) -> Sequence | None:
        """The first of several unfinished texts, which processes the prompt for all; None for a single text."""
        unfinished = [sequence for sequence in self.state.sequences if sequence.pending]
        return unfinished[0] if len(unfinished) > 1 else None

    def rows(self) -> Iterator["Row"]:
        for sequence in self.state.sequences:
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
