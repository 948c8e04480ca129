"""Admission, preemption and the division of a step: the engine's decisions, computed from numbers alone.

The scheduler reads no clock, starts no thread and knows no model. The caller passes the time, and holds a lock if
several threads call. Between two steps the engine calls `ended`, `expire`, `admit`, `plan` and, if a row finds no
block, `preempt` and `plan` again; after a step `record_step`; and `offer` at any time.

**Order.** A request of priority p that arrives at t ranks like one of priority 0 that arrives at t + p * ageing.

**Admission.** The head of the queue is admitted as soon as its sequences and its blocks fit; nothing overtakes it.
The blocks of the prompt and of all new tokens are reserved; with `overcommit` above 1 only `1 / overcommit` of the
new tokens.

**Preemption.** The newest running request is preempted and goes back to the head of the queue. Admission then pauses
until a request has ended, and the preempted one returns with all its blocks reserved. So the oldest running request
always progresses.

**Prompts.** Decoding rows take part in every step. Prompts get the time that decoding leaves of `max_step_ms`, as
measured by `StepTimeModel`, but at least 4 tokens a step. Without that limit a step may take 2.25 times as long as
its decoding rows alone, and at least 100 ms; then prompts get at least 16 tokens. When nothing decodes they get
`prefill_chunk` tokens. Steps alternate between the oldest prompt and the one with the fewest remaining tokens; the
rest goes to the next. So the oldest prompt takes at most twice as many steps as it would alone, plus one.
"""

import math
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from onward.engine.throughput import Chunk, StepTimeModel, Throughput

# The minimum number of prompt tokens in a step, with a limit and without: prompts progress however slow steps are.
_MIN_TOKENS_LIMITED, _MIN_TOKENS = 4, 16
# The minimum size of a step's chunks after the first, unless they end their prompt.
_MIN_LATER_CHUNK = 32
# Without a limit: how much longer prompts may make a step, and the seconds that every step may take.
_MAX_SLOWDOWN, _ALLOWED_STEP = 2.25, 0.100
# The sizes of chunks: 4, 8, 16, 32, 48, 64, 96, 128, 192, … They are few, because a forward may be traced for each.
_SIZES = (4, 8, 16, *(size for power in range(5, 24) for size in (1 << power, 3 << power - 1)))
# Seconds after which a rejected request may try again: before any measurement, and at most.
_DEFAULT_RETRY, _MAX_RETRY = 1.0, 600.0


class SchedulerRequest(Protocol):
    """The numbers that the scheduler reads. Requests are hashed by identity."""

    @property
    def priority(self) -> int:
        """Smaller values go first."""

    @property
    def sequences(self) -> int:
        """The rows that it takes at once, samples or beams: at most `max_sequences`."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens to process before it decodes: those of its prompt, and after a preemption its generated ones."""

    @property
    def max_new_tokens(self) -> int:
        """The maximum number of tokens that each of its sequences may still generate."""

    @property
    def deadline(self) -> float:
        """On the clock of `now`; infinity means none."""


class Row(Protocol):
    """One running sequence: `computed` of its `total` tokens are in the KV cache; total > computed."""

    @property
    def computed(self) -> int: ...

    @property
    def total(self) -> int: ...


ItemT = TypeVar("ItemT", bound=SchedulerRequest)
RowT = TypeVar("RowT", bound=Row)


class QueueFull(NamedTuple):
    """reason: the limit that is reached. seconds: the estimated time until there is room."""

    reason: str
    seconds: float


class _Waiting(NamedTuple, Generic[ItemT]):
    """rank: its unique place in the queue, smaller first. tokens: of its prompt, as counted on arrival."""

    rank: tuple[float, int]
    item: ItemT
    tokens: int


class Scheduler(Generic[ItemT]):
    """The scheduler of one engine, which checks its limits. The parameters are those of `Engine`.

    pace, throughput: the measurements. waiting_tokens, preemptions: counts.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        max_waiting: int,
        max_waiting_tokens: int,
        max_step_ms: float | None = None,
        prefill_chunk: int = 512,
        overcommit: float = 1.0,
        ageing: float = 10.0,
    ) -> None:
        self._max_sequences = max_sequences
        self._max_waiting, self._max_waiting_tokens = max_waiting, max_waiting_tokens
        self._max_step = None if max_step_ms is None else max_step_ms / 1000
        self._min_tokens = _MIN_TOKENS if max_step_ms is None else _MIN_TOKENS_LIMITED
        self._prefill_chunk = prefill_chunk
        sizes = [size for size in _SIZES if size <= prefill_chunk]
        self._sizes = sizes if prefill_chunk >= _MIN_TOKENS else [prefill_chunk]
        self._overcommit = overcommit
        self._ageing = ageing
        self.pace, self.throughput = StepTimeModel(), Throughput()
        self.waiting_tokens = self.preemptions = 0
        self._queue: list[_Waiting[ItemT]] = []
        self._running: dict[ItemT, None] = {}  # in order of admission
        self._preempted: set[ItemT] = set()  # waiting or running again
        self._sequences = 0  # of all running requests
        self._earliest = math.inf  # a lower bound of the deadlines of waiting requests
        self._offers = self._admitted = 0  # in all, and since the last step
        self._admission_paused = False  # until a request has ended
        self._shortest_first = False  # in the next step
        self._decoding, self._chunks = 0, list[Chunk]()  # of the last planned step

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> Sequence[ItemT]:
        """The running requests in order of admission."""
        return list(self._running)

    def offer(self, item: ItemT, now: float) -> QueueFull | None:
        """Queue a request and return None, or reject it and change nothing."""
        assert 0 < item.sequences <= self._max_sequences, "such a request could never run"
        tokens = item.prompt_tokens
        if self.waiting >= self._max_waiting:
            reason = f"{self.waiting} requests wait (max_waiting={self._max_waiting})"
            return QueueFull(reason, _wait(1 + self.waiting - self._max_waiting, self.throughput.admitted))
        excess = self.waiting_tokens + tokens - self._max_waiting_tokens
        if excess > 0 and self._queue:
            reason = f"{self.waiting_tokens} tokens of prompts wait (max_waiting_tokens={self._max_waiting_tokens})"
            return QueueFull(f"{reason}, and this one has {tokens}", _wait(excess, self.throughput.prompt))
        self._offers += 1
        self._wait(item, (now + item.priority * self._ageing, self._offers))
        return None

    def ended(self, item: ItemT) -> None:
        """Remove a request that has ended or was cancelled, if it waits or runs."""
        self._preempted.discard(item)
        if item in self._running:
            self._leave(item)
            self._admission_paused = False
        else:
            self._remove([waiting for waiting in self._queue if waiting.item is item])

    def expire(self, now: float) -> list[ItemT]:
        """Remove and return the waiting requests whose deadline has passed."""
        if now < self._earliest:
            return []
        late = [waiting.item for waiting in self._queue if waiting.item.deadline <= now]
        for item in late:
            self.ended(item)
        self._earliest = min((waiting.item.deadline for waiting in self._queue), default=math.inf)
        return late

    def admit(self, reserve: Callable[[ItemT, int], bool]) -> list[ItemT]:
        """Admit requests from the queue, in order.

        reserve(item, new_tokens): take the blocks for its `prompt_tokens` and for `new_tokens` of each of its
            sequences, and return True; or take none and return False. The caller frees them when the request ends or is
            preempted. With nothing else running it must eventually return True, or the head waits forever.
        """
        admitted: list[ItemT] = []
        while self._queue and not (self._admission_paused and self._running):
            head = self._queue[0]
            item = head.item
            if self._sequences + item.sequences > self._max_sequences:
                break
            overcommit = 1.0 if item in self._preempted else self._overcommit
            if not reserve(item, math.ceil(item.max_new_tokens / overcommit)):
                break
            self._remove([head])
            self._running[item] = None
            self._sequences += item.sequences
            self._admitted += 1
            admitted.append(item)
        return admitted

    def preempt(self) -> ItemT | None:
        """Preempt the newest running request: move it to the head of the queue and return it.

        None if fewer than two run: a single request that finds no block has to end.
        """
        if len(self._running) < 2:
            return None
        item = next(reversed(self._running))
        self._leave(item)
        self._preempted.add(item)
        self.preemptions += 1
        # A later preemption hits an older request, so it goes before earlier ones.
        self._wait(item, (-math.inf, -self.preemptions))
        self._admission_paused = True
        return item

    def plan(self, rows: Sequence[RowT]) -> list[tuple[RowT, int]]:
        """How many tokens of each row the next step processes, at least one; rows that have to wait are omitted.

        rows: all running rows, in order of admission.
        """
        self._decoding = sum(row.total - row.computed == 1 for row in rows)
        self._chunks = []
        prompts = [row for row in rows if row.total - row.computed > 1]
        if self._shortest_first:
            prompts.sort(key=lambda row: row.total - row.computed)
        seconds = self._seconds_for_prompts() if self._decoding else math.inf
        tokens = self._prefill_chunk
        counts: dict[int, int] = {}
        for row in prompts:
            count = self._chunk_size(row, seconds, tokens)
            if not count:
                break
            counts[id(row)] = count
            seconds -= self.pace.chunk(row.computed, count)
            tokens -= count
            self._chunks.append((row.computed, count))
        planned = [(row, 1 if row.total - row.computed == 1 else counts.get(id(row), 0)) for row in rows]
        return [(row, count) for row, count in planned if count]

    def _seconds_for_prompts(self) -> float:
        decoding = self.pace.decode(self._decoding)
        limit = max(_MAX_SLOWDOWN * decoding, _ALLOWED_STEP) if self._max_step is None else self._max_step
        return limit - decoding

    def _chunk_size(self, row: Row, seconds: float, tokens: int) -> int:
        """The most tokens of a prompt that fit into these seconds and tokens: all that remain, or a size.

        Chunks after a step's first that end no prompt have at least 32: each makes attention read another cache.
        """
        pending, first = row.total - row.computed, not self._chunks
        smaller = (size for size in reversed(self._sizes) if size < pending and (first or size >= _MIN_LATER_CHUNK))
        for size in (pending, *smaller):
            is_minimum = first and size <= self._min_tokens
            if size <= tokens and (is_minimum or self.pace.chunk(row.computed, size) <= seconds):
                return size
        return 0

    def record_step(self, seconds: float, output: int) -> None:
        """Record the time of the last planned step, and the number of tokens it emitted."""
        self.pace.record_step(self._decoding, self._chunks, seconds)
        prompt = sum(tokens for _, tokens in self._chunks)
        self.throughput.record_step(seconds, prompt=prompt, output=output, admitted=self._admitted)
        self._admitted = 0
        if self._chunks:
            self._shortest_first = not self._shortest_first

    def _wait(self, item: ItemT, rank: tuple[float, int]) -> None:
        waiting = _Waiting(rank, item, item.prompt_tokens)
        insort(self._queue, waiting, key=lambda waiting: waiting.rank)
        self._earliest = min(self._earliest, item.deadline)
        self.waiting_tokens += waiting.tokens

    def _remove(self, removed: Sequence[_Waiting[ItemT]]) -> None:
        for waiting in removed:
            self._queue.remove(waiting)
            self.waiting_tokens -= waiting.tokens

    def _leave(self, item: ItemT) -> None:
        del self._running[item]
        self._sequences -= item.sequences


def _wait(amount: float, rate: float) -> float:
    return min(amount / rate, _MAX_RETRY) if rate else _DEFAULT_RETRY
