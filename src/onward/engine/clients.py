"""The requests that wait and run, by client: which one is next, and which ones are preempted for it.

**Shares.** A request takes a share of the engine: its part of `max_sequences` or of the cache, whichever is larger. A
client's share is the sum over its running requests. With k clients that have work the fair share is 1 / k, but at
least one sequence.

**The next request** is the first of the client with the smallest share, among those whose first request keeps its
client within the fair share, and after them among the others. Equal shares go by rank. So priorities order the
requests of one client; between clients they only break ties. A client alone has the order of the ranks.

**Preemption for a share.** If the next request keeps its client within the fair share but does not fit, the newest
requests of clients above the fair share are preempted until it fits, those of the largest client first. None is
preempted if all of them would not suffice.

**Requests beyond the fair share** wait until they fit, and others overtake them. Every 10 seconds of steps one that has
waited for so long, of a client of which nothing runs, goes first and may preempt any other client's.

**Progress.** A request that returns after a preemption, or that has gone first as above, is protected: it is not
preempted for a share until it has decoded for half a second longer than its prompt took. So more than half of its time
goes into new tokens, and a client within its fair share waits for at most three times this time and three steps. While
admission is paused after a preemption for blocks, nothing is preempted for a share.
"""

import math
from bisect import bisect_left, insort
from typing import Generic, NamedTuple, Protocol, TypeVar

# Seconds of steps for which a protected request decodes, at least.
_TURN = 0.5
# Seconds of steps after which a request beyond the fair share may go first.
_PATIENCE = 10.0
# Rounding errors of sums of shares.
_EPSILON = 1e-9


class SchedulerRequest(Protocol):
    """The numbers that the scheduler reads. Requests are hashed by identity."""

    @property
    def priority(self) -> int:
        """Smaller values go first."""

    @property
    def client(self) -> str | None:
        """The name of the one who asks. Requests without a name share a client."""

    @property
    def num_sequences(self) -> int:
        """The rows that it takes at once, samples or beams: at most `max_sequences`."""

    @property
    def cache_share(self) -> float:
        """The part of the cache that it may take, from 0 to 1."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens to process before it decodes: those of its prompt, and after a preemption its generated ones."""

    @property
    def max_new_tokens(self) -> int:
        """The maximum number of tokens that each of its sequences may still generate."""

    @property
    def deadline(self) -> float:
        """On the clock of `now`; infinity means none."""

    @property
    def decodes(self) -> bool:
        """Whether it runs and has processed its prompt."""


ItemT = TypeVar("ItemT", bound=SchedulerRequest)


class Waiting(NamedTuple, Generic[ItemT]):
    """rank: its unique place among those of its client, smaller first. tokens: of its prompt, as counted on arrival.
    since: the seconds of steps when it was queued."""

    rank: tuple[float, int]
    item: ItemT
    tokens: int
    share: float
    since: float


class _Client(Generic[ItemT]):
    """waiting: by rank. tokens: of their prompts. running: with the share of each, in order of admission.
    share: of all that run. idle: the first that waits, if none runs."""

    def __init__(self) -> None:
        self.waiting: list[Waiting[ItemT]] = []
        self.tokens = 0
        self.running: dict[ItemT, float] = {}
        self.share = 0.0
        self.idle: Waiting[ItemT] | None = None


class Clients(Generic[ItemT]):
    """All clients with work.

    waiting: the requests in the queue. waiting_tokens: of their prompts. running: the others, in order of admission.
    sequences: of all running requests.
    """

    def __init__(self, max_sequences: int) -> None:
        self.waiting: dict[ItemT, Waiting[ItemT]] = {}
        self.running: dict[ItemT, None] = {}
        self.waiting_tokens = self.sequences = 0
        self._max_sequences = max_sequences
        self._clients: dict[str | None, _Client[ItemT]] = {}
        self._busy: dict[_Client[ItemT], None] = {}  # those of which a request runs
        self._idle: list[Waiting[ItemT]] = []  # of each other client the first request, by rank
        self._seconds = 0.0  # of all steps
        self._last_turn = 0.0  # when a request beyond its share went first
        self._beneficiary: ItemT | None = None  # others were preempted for it, so it is next
        self._protected: dict[ItemT, float] = {}  # running requests, and the seconds for which each has yet to decode

    def __len__(self) -> int:
        return len(self._clients)

    def counted(self, name: str | None, most: int, most_tokens: int) -> tuple[int, int]:
        """The waiting requests and tokens that count against a client: at most a fixed number for each other client."""
        requests = tokens = 0
        for other, client in self._clients.items():
            own = other == name
            requests += len(client.waiting) if own else min(len(client.waiting), most)
            tokens += client.tokens if own else min(client.tokens, most_tokens)
        return requests, tokens

    def wait(self, item: ItemT, rank: tuple[float, int]) -> None:
        """Queue a request."""
        client = self._clients.setdefault(item.client, _Client())
        share = max(item.num_sequences / self._max_sequences, item.cache_share)
        waiting = self.waiting[item] = Waiting(rank, item, item.prompt_tokens, share, self._seconds)
        insort(client.waiting, waiting)
        client.tokens += waiting.tokens
        self.waiting_tokens += waiting.tokens
        self._changed(client)

    def run(self, item: ItemT, *, protected: bool) -> None:
        """Move a request from the queue to those that run. protected: it was preempted before."""
        client, waiting = self._clients[item.client], self.waiting[item]
        if waiting is client.idle and waiting.share > self._fair_share and self._is_overdue(waiting):
            self._last_turn, protected = self._seconds, True
        self._unqueue(client, item)
        client.running[item] = waiting.share
        self.running[item] = None
        self.sequences += item.num_sequences
        self._changed(client, running=True)
        if protected:
            self._protected[item] = _TURN

    def remove(self, item: ItemT) -> None:
        """Forget a request that waits or runs."""
        client = self._clients[item.client]
        if item in self.running:
            del self.running[item], client.running[item]
            self.sequences -= item.num_sequences
            self._protected.pop(item, None)
            self._changed(client, running=True)
        else:
            self._unqueue(client, item)
            self._changed(client)
        if not (client.waiting or client.running):
            del self._clients[item.client]

    def _unqueue(self, client: _Client[ItemT], item: ItemT) -> None:
        waiting = self.waiting.pop(item)
        del client.waiting[bisect_left(client.waiting, waiting)]
        client.tokens -= waiting.tokens
        self.waiting_tokens -= waiting.tokens
        if item is self._beneficiary:
            self._beneficiary = None

    def _changed(self, client: _Client[ItemT], *, running: bool = False) -> None:
        if running:
            client.share = math.fsum(client.running.values())
            if client.running:
                self._busy[client] = None
            else:
                del self._busy[client]
        idle = client.waiting[0] if client.waiting and not client.running else None
        if idle is not client.idle:
            if client.idle is not None:
                del self._idle[bisect_left(self._idle, client.idle)]
            if idle is not None:
                insort(self._idle, idle)
            client.idle = idle

    def record_step(self, seconds: float) -> None:
        self._seconds += seconds
        for item, left in list(self._protected.items()):
            left += -seconds if item.decodes else seconds
            if left > 0:
                self._protected[item] = left
            else:
                del self._protected[item]

    def next(self) -> ItemT | None:
        """The next request to admit. Nothing overtakes it."""
        if self._beneficiary is not None or not self.waiting:
            return self._beneficiary
        fair, overdue, within = self._fair_share, None, None
        for waiting in self._idle:
            if waiting.share <= fair:
                within = waiting
                break
            if self._is_overdue(waiting) and (overdue is None or waiting.since < overdue.since):
                overdue = waiting
        first = overdue or within
        if first is None:
            order = [
                (client.share + client.waiting[0].share > fair, client.share, client.waiting[0])
                for client in self._busy
                if client.waiting
            ]
            if self._idle:
                order.append((True, 0.0, self._idle[0]))
            first = min(order)[-1] if order else None
        return None if first is None else first.item

    @property
    def _fair_share(self) -> float:
        return 1 / min(len(self._clients), self._max_sequences) + _EPSILON

    def _is_overdue(self, waiting: Waiting[ItemT]) -> bool:
        """Whether a request beyond the fair share may go first and preempt all others."""
        return self._seconds - max(waiting.since, self._last_turn) >= _PATIENCE

    def newest(self) -> ItemT | None:
        """The newest running request of the client with the largest share; never the oldest of all."""
        newest_first = list(reversed(self.running))[:-1]
        return max(newest_first, key=lambda item: self._clients[item.client].share, default=None)

    def victim(self) -> ItemT | None:
        """The request to preempt for the next one, which has found no room; None if it has to wait."""
        if len(self._clients) < 2 or (item := self.next()) is None:
            return None
        client, waiting, fair = self._clients[item.client], self.waiting[item], self._fair_share
        if client.share + waiting.share > fair:
            if client.running or not self._is_overdue(waiting):
                return None
            fair = 0.0
        others = [(each, self._above(each, fair)) for each in self._busy if each is not client]
        # A request surely fits if all shares sum up to 1.
        busy = sum(each.share for each in self._busy)
        freed = sum(each.running[victim] for each, victims in others for victim in victims)
        if busy - freed + waiting.share > 1 + _EPSILON:
            return None
        largest = max((each for each, victims in others if victims), key=lambda each: each.share, default=None)
        self._beneficiary = item
        return next(victims[0] for each, victims in others if each is largest)

    def _above(self, client: _Client[ItemT], fair: float) -> list[ItemT]:
        """The newest requests of a client that are not protected, until the others are within the fair share."""
        share, victims = client.share, list[ItemT]()
        for item in reversed(client.running):
            if share > fair and item not in self._protected:
                victims.append(item)
                share -= client.running[item]
        return victims
