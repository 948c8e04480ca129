"""Admission, preemption and the division of a step: the engine's decisions, computed from numbers alone.

The scheduler reads no clock, starts no thread and knows no model. The caller passes the time, and holds a lock if
several threads call. Between two steps the engine calls `ended`, `expire`, `admit` and `make_room` in turn, `plan` and,
if a row finds no block, `preempt` and `plan` again; after a step `record_step`; and `offer` at any time.

**Order.** A request of priority p that arrives at t ranks like one of priority 0 that arrives at t + p * ageing. With
several clients `Clients` chooses the next one, and those that are preempted for it.

**Admission.** The next request is admitted as soon as its sequences and its blocks fit; nothing overtakes it.
The blocks of the prompt and of all new tokens are reserved; with `overcommit` above 1 only `1 / overcommit` of the
new tokens.

**Preemption.** If blocks are missing, the newest running request of the client with the largest share is preempted and
goes back to the head of its queue, but never the oldest of all. Admission then pauses until a request has ended, and
the preempted one returns with all its blocks reserved. So the oldest running request is preempted for no block.

**Limits of the queue.** Against a client count its own waiting requests and tokens, and those of each other client up
to half of the limit. So a client alone may fill the queue, and the others still have half of it.

**Prompts.** Decoding rows take part in every step. Prompts get the time that decoding leaves of `max_step_ms`, as
measured by `StepTimeModel`, but at least 4 tokens. Without that limit a step may take 1.8 times as long as its decoding
rows alone, and at least 40 ms. So prompts get four ninths of the time, and 99 of 100 gaps between tokens stay below
three times the usual one, although texts grow and times vary. Prompts that need a forward of their own then get at
least 16 tokens, and every 17th step only decodes, to measure the rows alone. When nothing decodes, prompts get
`prefill_chunk` tokens. Steps with prompts alternate between the oldest prompt and the one with the fewest remaining
tokens, of the client with the fewest prompts; the rest goes to the next. So the oldest prompt takes at most twice as
many of these steps as it would alone, plus one.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from onward.engine.clients import Clients, ItemT
from onward.engine.throughput import Chunk, StepTimeModel, Throughput

# The minimum number of prompt tokens in a step: prompts progress however slow steps are. The second one holds without a
# limit if prompts need a forward of their own, because that one reads all weights.
_MIN_TOKENS, _MIN_TOKENS_APART = 4, 16
# The minimum size of a step's chunks after the first, unless they end their prompt.
_MIN_LATER_CHUNK = 32
# Without a limit: how much longer prompts may make a step, and the seconds that every step may take.
_MAX_SLOWDOWN, _ALLOWED_STEP = 1.8, 0.040
# The sizes of chunks: 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, … They are few, because a forward may be traced for each.
_SIZES = (4, 6, 8, 12, *(quarters << power for power in range(2, 22) for quarters in (4, 5, 6, 7)))
# Seconds after which a rejected request may try again: before any measurement, and at most.
_DEFAULT_RETRY, _MAX_RETRY = 1.0, 600.0


class Row(Protocol):
    """One running sequence: `computed` of its `total` tokens are in the KV cache; total > computed."""

    @property
    def computed(self) -> int: ...

    @property
    def total(self) -> int: ...

    @property
    def client(self) -> str | None:
        """That of its request."""


RowT = TypeVar("RowT", bound=Row)


class QueueFull(NamedTuple):
    """reason: the limit that is reached. seconds: the estimated time until there is room."""

    reason: str
    seconds: float


class Scheduler(Generic[ItemT]):
    """The scheduler of one engine, which checks its limits. The parameters are those of `Engine`.

    joins: whether chunks of prompts run in the forward of the decoding rows.
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
        joins: bool = True,
    ) -> None:
        self.max_sequences = max_sequences
        self._max_waiting, self._max_waiting_tokens = max_waiting, max_waiting_tokens
        self._max_step = None if max_step_ms is None else max_step_ms / 1000
        self._min_tokens = _MIN_TOKENS if joins or max_step_ms is not None else _MIN_TOKENS_APART
        self._prefill_chunk = prefill_chunk
        self._sizes = [size for size in _SIZES if size <= prefill_chunk] or [prefill_chunk]
        self._overcommit = overcommit
        self._ageing = ageing
        self.pace, self.throughput = StepTimeModel(), Throughput()
        self.preemptions = 0
        self._clients: Clients[ItemT] = Clients(max_sequences)
        self._preempted: set[ItemT] = set()  # waiting or running again
        self._earliest = math.inf  # a lower bound of the deadlines of waiting requests
        self._offers = self._admitted = 0  # in all, and since the last step
        self._admission_paused = False  # until a request has ended
        self._shortest_first = False  # in the next step
        self._decoding, self._chunks = 0, list[Chunk]()  # of the last planned step

    @property
    def waiting(self) -> int:
        return len(self._clients.waiting)

    @property
    def waiting_tokens(self) -> int:
        return self._clients.waiting_tokens

    @property
    def running(self) -> Sequence[ItemT]:
        """The running requests in order of admission."""
        return list(self._clients.running)

    def offer(self, item: ItemT, now: float) -> QueueFull | None:
        """Queue a request and return None, or reject it and change nothing."""
        assert 0 < item.num_sequences <= self.max_sequences, "such a request could never run"
        tokens, most, most_tokens = item.prompt_tokens, self._max_waiting, self._max_waiting_tokens
        waiting, waiting_tokens = self.waiting, self.waiting_tokens
        if waiting >= most or waiting_tokens + tokens > most_tokens:
            waiting, waiting_tokens = self._clients.counted(item.client, -(-most // 2), -(-most_tokens // 2))
        if waiting >= most:
            reason = f"{self.waiting} requests wait (max_waiting={most})"
            return QueueFull(reason, _wait(1 + waiting - most, self.throughput.admitted))
        excess = waiting_tokens + tokens - most_tokens
        if excess > 0 and waiting:
            reason = f"{self.waiting_tokens} tokens of prompts wait (max_waiting_tokens={most_tokens})"
            return QueueFull(f"{reason}, and this one has {tokens}", _wait(excess, self.throughput.prompt))
        self._offers += 1
        self._wait(item, (now + item.priority * self._ageing, self._offers))
        return None

    def ended(self, item: ItemT) -> None:
        """Remove a request that has ended or was cancelled, if it waits or runs."""
        self._preempted.discard(item)
        if item in self._clients.running:
            self._admission_paused = False
        elif item not in self._clients.waiting:
            return
        self._clients.remove(item)

    def expire(self, now: float) -> list[ItemT]:
        """Remove and return the waiting requests whose deadline has passed."""
        if now < self._earliest:
            return []
        late = [item for item in self._clients.waiting if item.deadline <= now]
        for item in late:
            self.ended(item)
        self._earliest = min((item.deadline for item in self._clients.waiting), default=math.inf)
        return late

    def admit(self, reserve: Callable[[ItemT, int], bool], *, new: bool = True) -> list[ItemT]:
        """Admit requests from the queue, in order. new: whether requests that have not run before may start.

        reserve(item, new_tokens): take the blocks for its `prompt_tokens` and for `new_tokens` of each of its
            sequences, and return True; or take none and return False. The caller frees them when the request ends or is
            preempted. With nothing else running it must eventually return True, or the next request waits forever.
        """
        admitted: list[ItemT] = []
        clients = self._clients
        while not self._waits_for_an_end and (item := clients.next() if new else self._next_preempted()) is not None:
            if clients.sequences + item.num_sequences > self.max_sequences:
                break
            returns = item in self._preempted
            overcommit = 1.0 if returns else self._overcommit
            if not reserve(item, math.ceil(item.max_new_tokens / overcommit)):
                break
            clients.run(item, protected=returns)
            self._admitted += 1
            admitted.append(item)
        return admitted

    def make_room(self) -> ItemT | None:
        """After `admit`: preempt a request of another client for the next one, if it may have the room, and return it.

        The caller frees its blocks and calls `admit` again, and so on until this returns None.
        """
        victim = None if self._waits_for_an_end else self._clients.victim()
        if victim is not None:
            self._preempt(victim)
        return victim

    def preempt(self) -> ItemT | None:
        """Preempt a running request because blocks are missing: move it to the head of the queue and return it.

        None if fewer than two run: a single request that finds no block has to end.
        """
        victim = self._clients.newest()
        if victim is not None:
            self._preempt(victim)
            self._admission_paused = True
        return victim

    def preempt_all(self, items: Sequence[ItemT]) -> Sequence[ItemT]:
        """Move these running requests to the head of the queue, in their order, and return them."""
        for item in reversed(items):
            self._preempt(item)
        return items

    def _next_preempted(self) -> ItemT | None:
        waiting = [self._clients.waiting[item] for item in self._preempted if item in self._clients.waiting]
        return min(waiting, key=lambda each: each.rank).item if waiting else None

    @property
    def _waits_for_an_end(self) -> bool:
        return self._admission_paused and bool(self._clients.running)

    def _preempt(self, item: ItemT) -> None:
        self._clients.remove(item)
        self._preempted.add(item)
        self.preemptions += 1
        # A later preemption hits an older request, so it goes before earlier ones.
        self._wait(item, (-math.inf, -self.preemptions))

    def _wait(self, item: ItemT, rank: tuple[float, int]) -> None:
        self._clients.wait(item, rank)
        self._earliest = min(self._earliest, item.deadline)

    def plan(self, rows: Sequence[RowT]) -> list[tuple[RowT, int]]:
        """How many tokens of each row the next step processes, at least one; rows that have to wait are omitted.

        rows: all running rows, in order of admission.
        """
        self._decoding = sum(row.total - row.computed == 1 for row in rows)
        self._chunks = []
        measures = self._max_step is None and self._decoding > 0 and self.pace.is_stale(self._decoding)
        prompts = [] if measures else [row for row in rows if row.total - row.computed > 1]
        if self._shortest_first and len(prompts) > 1:
            of_client = Counter(row.client for row in prompts)
            prompts.sort(key=lambda row: (of_client[row.client], row.total - row.computed))
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
        self._clients.record_step(seconds)
        self.pace.record_step(self._decoding, self._chunks, seconds)
        prompt = sum(tokens for _, tokens in self._chunks)
        self.throughput.record_step(seconds, prompt=prompt, output=output, admitted=self._admitted)
        self._admitted = 0
        if self._chunks:
            self._shortest_first = not self._shortest_first


def _wait(amount: float, rate: float) -> float:
    return min(amount / rate, _MAX_RETRY) if rate else _DEFAULT_RETRY
