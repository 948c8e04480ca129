"""Who waits, who joins, and how much of a prompt a step takes: the engine's decisions, over numbers alone.

The policy reads no clock, starts no thread and knows no model. Whoever drives it says what time it is, and holds a lock
where several threads call it. Between two steps the engine calls `ended`, `expire`, `admit`, `plan` and, where a row
finds no block, `preempt` and `plan` again; after a step `note`; and `offer` at any time.

**Order.** A request of priority p that arrives at t ranks as one of priority 0 that arrives at t + p * ageing.

**Admission.** The head of the queue joins as soon as its sequences and its blocks find room; until then nobody else
does. The blocks of the prompt and of all that may be generated are reserved; with `overcommit` above 1 only
`1 / overcommit` of what may be generated.

**Preemption.** The newest request that runs gives way and goes back to the head of the queue. Then nobody joins until
a request has ended, and the preempted one comes back with all its blocks reserved. So the request that has run the
longest always goes on.

**Prompts.** Rows that decode take part in every step. Prompts get the time that decoding leaves of `max_step_ms`, as
measured by `StepTimeModel`, but at least 4 tokens a step. Without that limit a step may take 2.25 times as long as
its decoding rows alone, and at least 100 ms; then prompts get 16 tokens at least. Where nobody decodes they get
`prefill_chunk` tokens. Steps give the time in turns: to the prompt that came first, and to the one that has the fewest
tokens left; what one leaves goes to the next. So the prompt that came first takes at most twice as many steps as if it
were alone, and one more.
"""

import math
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from onward.engine.throughput import Chunk, StepTimeModel, Throughput

# A step's prompt tokens are at least these, with a limit and without, however slow steps are: prompts always progress.
_LEAST_LIMITED, _LEAST = 4, 16
# A later prompt of a step that does not end in it has so many at least.
_LEAST_OF_LATER = 32
# Without a limit: how much longer prompts may make a step, and the seconds that any step may take.
_GROWTH, _SHORT_STEP = 2.25, 0.100
# The sizes of chunks: 4, 8, 16, 32, 48, 64, 96, 128, 192, … They are few, for a forward may be traced for each.
_SIZES = (4, 8, 16, *(size for power in range(5, 24) for size in (1 << power, 3 << power - 1)))
# Seconds after which a refused request may come back: where nothing was measured yet, and at most.
_UNKNOWN_WAIT, _LONGEST_WAIT = 1.0, 600.0


class SchedulerRequest(Protocol):
    """What the policy asks of a request. Requests are told apart by identity, so they must be hashable that way."""

    @property
    def priority(self) -> int:
        """Smaller goes first."""

    @property
    def sequences(self) -> int:
        """The rows that it takes at once: samples or beams, at most `max_sequences`."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens to process before it decodes: of its prompt, after a preemption of what it had generated too."""

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that each of its sequences may still generate."""

    @property
    def deadline(self) -> float:
        """On the clock of `now`; infinite for none."""


class Row(Protocol):
    """One sequence that runs: `computed` of its `total` tokens have keys and values; total > computed."""

    @property
    def computed(self) -> int: ...

    @property
    def total(self) -> int: ...


ItemT = TypeVar("ItemT", bound=SchedulerRequest)
RowT = TypeVar("RowT", bound=Row)


class QueueFull(NamedTuple):
    """reason: which limit is reached. seconds: how long until there is room, as far as the measured rates tell."""

    reason: str
    seconds: float


class _Waiting(NamedTuple, Generic[ItemT]):
    """rank: its place in the queue, smaller first; no two are equal. tokens: of its prompt, as counted when it came."""

    rank: tuple[float, int]
    item: ItemT
    tokens: int


class Scheduler(Generic[ItemT]):
    """The decisions of one engine (see the module). Its limits are checked by the engine.

    max_sequences: the most rows that run at once.
    max_waiting, max_waiting_tokens: the most requests, and tokens of their prompts, that wait.
    max_step_ms: how long a step may take about, in milliseconds, while rows decode; None: see Prompts.
    prefill_chunk: the most tokens of prompts in a step.
    overcommit: 1 or more; see Admission.
    ageing: seconds of waiting that a step of priority is worth.

    pace, throughput: what was measured.
    waiting_tokens, preemptions: counts.
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
        self._least_tokens = _LEAST if max_step_ms is None else _LEAST_LIMITED
        self._prefill_chunk = prefill_chunk
        self._sizes = [size for size in _SIZES if size <= prefill_chunk] if prefill_chunk >= _LEAST else [prefill_chunk]
        self._overcommit = overcommit
        self._ageing = ageing
        self.pace, self.throughput = StepTimeModel(), Throughput()
        self.waiting_tokens = self.preemptions = 0
        self._queue: list[_Waiting[ItemT]] = []
        self._running: dict[ItemT, None] = {}  # in the order of admission
        self._preempted: set[ItemT] = set()  # of those that wait or run
        self._sequences = 0  # of all that run
        self._earliest = math.inf  # no deadline of those that wait is before
        self._offers = self._admitted = 0  # in all, and since the last step
        self._nobody_joins = False  # until a request has ended
        self._shortest_first = False  # in the next step
        self._decoding, self._chunks = 0, list[Chunk]()  # of the step planned last

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def running(self) -> Sequence[ItemT]:
        """The requests that run, the one admitted first first."""
        return list(self._running)

    def offer(self, item: ItemT, now: float) -> QueueFull | None:
        """A request arrives: it joins the queue (None), or is refused and nothing has changed."""
        assert 0 < item.sequences <= self._max_sequences, "such a request could never run"
        tokens = item.prompt_tokens
        if self.waiting >= self._max_waiting:
            requests = 1 + self.waiting - self._max_waiting
            return QueueFull(
                f"{self.waiting} requests wait (max_waiting={self._max_waiting})",
                _wait(requests, self.throughput.admitted),
            )
        excess = self.waiting_tokens + tokens - self._max_waiting_tokens
        if excess > 0 and self._queue:
            return QueueFull(
                f"{self.waiting_tokens} tokens of prompts wait (max_waiting_tokens={self._max_waiting_tokens}), "
                f"and this one has {tokens}",
                _wait(excess, self.throughput.prompt),
            )
        self._offers += 1
        self._wait(item, (now + item.priority * self._ageing, self._offers))
        return None

    def ended(self, item: ItemT) -> None:
        """A request has ended, or was cancelled: it waits and runs no longer. Nothing happens where it did neither."""
        self._preempted.discard(item)
        if item in self._running:
            self._leave(item)
            self._nobody_joins = False
        else:
            self._remove([waiting for waiting in self._queue if waiting.item is item])

    def expire(self, now: float) -> list[ItemT]:
        """The waiting requests whose deadline has come; they wait no longer."""
        if now < self._earliest:
            return []
        late = [waiting.item for waiting in self._queue if waiting.item.deadline <= now]
        for item in late:
            self.ended(item)
        self._earliest = min((waiting.item.deadline for waiting in self._queue), default=math.inf)
        return late

    def admit(self, reserve: Callable[[ItemT, int], bool]) -> list[ItemT]:
        """The requests that join those running, in order.

        reserve(item, new_tokens): take the blocks of its `prompt_tokens` and of so many new tokens for each of its
            sequences, and say True; or take none, and say False. What it takes is given back by the caller when the
            request ends or is preempted. Where nobody runs it must say True in the end, or the head waits for ever.
        """
        admitted: list[ItemT] = []
        while self._queue and not (self._nobody_joins and self._running):
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
        """The request that has to give way: the newest that runs. It is at the head of the queue now.

        None where no other than one runs: it could always go on if the blocks were there for it, so it has to end.
        """
        if len(self._running) < 2:
            return None
        item = next(reversed(self._running))
        self._leave(item)
        self._preempted.add(item)
        self.preemptions += 1
        # The later one gives way, the longer it has run: it goes before those that did so earlier.
        self._wait(item, (-math.inf, -self.preemptions))
        self._nobody_joins = True
        return item

    def plan(self, rows: Sequence[RowT]) -> list[tuple[RowT, int]]:
        """How many tokens of each row the next step processes, at least one; rows that have to wait are left out.

        rows: all that run, in the order of admission.
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
        """What the rows that decode leave of a step."""
        decoding = self.pace.decode(self._decoding)
        limit = max(_GROWTH * decoding, _SHORT_STEP) if self._max_step is None else self._max_step
        return limit - decoding

    def _chunk_size(self, row: Row, seconds: float, tokens: int) -> int:
        """The most tokens of a prompt that fit into these seconds and tokens: all that it has left, or a size.

        Chunks after the first of a step that end no prompt have 32 at least: each makes attention read another cache.
        """
        pending, first = row.total - row.computed, not self._chunks
        smaller = (size for size in reversed(self._sizes) if size < pending and (first or size >= _LEAST_OF_LATER))
        for size in (pending, *smaller):
            in_any_case = first and size <= self._least_tokens
            if size <= tokens and (in_any_case or self.pace.chunk(row.computed, size) <= seconds):
                return size
        return 0

    def note(self, seconds: float, output: int) -> None:
        """The step planned last took so many seconds and emitted so many tokens."""
        self.pace.note(self._decoding, self._chunks, seconds)
        prompt = sum(tokens for _, tokens in self._chunks)
        self.throughput.note(seconds, prompt=prompt, output=output, admitted=self._admitted)
        self._admitted = 0
        if self._chunks:
            self._shortest_first = not self._shortest_first

    def _wait(self, item: ItemT, rank: tuple[float, int]) -> None:
        waiting = _Waiting(rank, item, item.prompt_tokens)
        insort(self._queue, waiting, key=lambda waiting: waiting.rank)
        self._earliest = min(self._earliest, item.deadline)
        self.waiting_tokens += waiting.tokens

    def _remove(self, gone: Sequence[_Waiting[ItemT]]) -> None:
        for waiting in gone:
            self._queue.remove(waiting)
            self.waiting_tokens -= waiting.tokens

    def _leave(self, item: ItemT) -> None:
        del self._running[item]
        self._sequences -= item.sequences


def _wait(amount: float, rate: float) -> float:
    """Seconds until so much has left the queue."""
    return min(amount / rate, _LONGEST_WAIT) if rate else _UNKNOWN_WAIT
