"""Many replicas behind one ingress: the router and the retry budget, driven by a heap of events."""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from simulated_replica import SimulatedEngine, StepTime, Text

from onward.cluster.ingress import RetryBudget, RetryOptions
from onward.cluster.router import HashRing


@dataclass(eq=False)
class Arrival:
    """A request at the ingress. key: what it has in common with others; blocks: of its prompt, by hash."""

    at: float
    prompt: int
    new: int
    key: str | None = None
    blocks: tuple[int, ...] = ()
    attempts: int = 0
    first: float | None = None  # when its client had the first token
    last: float | None = None  # and the last
    emitted: int = 0
    place: tuple[str, Text] | None = None  # where it is served
    avoid: set[str] = field(default_factory=set)
    failed: str = ""


@dataclass(frozen=True)
class Plan:
    """replicas: how many. failures: of them a second in all, each back after `restart` seconds. silence: until a loss
    is noticed. patience: seconds to the first token after which a client leaves; 0: none does. budget: whether the
    retries of all together are limited. deaths: (when, share of the replicas that die at once).
    """

    replicas: int
    affinity: bool = True
    failures: float = 0.0
    restart: float = 20.0
    noticed: float = 0.1
    options: RetryOptions = field(default_factory=RetryOptions)
    budget: bool = True
    patience: float = 20.0
    deaths: Sequence[tuple[float, float]] = ()
    max_sequences: int = 16
    blocks: int = 1024


class Fleet:
    """Runs arrivals through replicas until all are over.

    requests: all that came. retired: the engines of all replicas, when all is over. retries, exhausted: attempts after
    a loss, and losses for which the budget had none.
    """

    def __init__(self, plan: Plan, clock: StepTime, seed: int = 0) -> None:
        self._plan, self._clock = plan, clock
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._ring, self._budget = HashRing(), RetryBudget(plan.options)
        self._at: dict[str, dict[Text, Arrival]] = {}
        self._engines: dict[str, SimulatedEngine] = {}
        self._wake: dict[str, float] = {}
        self._names = itertools.count()
        self._open = 0
        self.requests: list[Arrival] = []
        self.retired: list[SimulatedEngine] = []
        self.retries = self.exhausted = self.deaths = 0
        self.now = 0.0
        for _ in range(plan.replicas):
            self._start(0.0)

    def run(self, arrivals: Sequence[Arrival]) -> "Fleet":
        for arrival in arrivals:
            self._post(arrival.at, lambda now, arrival=arrival: self._came(arrival, now))
        if self._plan.failures:
            self._post(self._random.expovariate(self._plan.failures), self._fail_one)
        for at, share in self._plan.deaths:
            self._post(at, lambda now, share=share: self._fail_share(share, now))
        self._open += len(arrivals)
        while self._open and self._events:
            self.now, _, event = heapq.heappop(self._events)
            event(self.now)
        self.retired += self._engines.values()
        return self

    def _post(self, at: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────

    def _came(self, arrival: Arrival, now: float) -> None:
        self.requests.append(arrival)
        self._budget.deposit()
        if self._plan.patience:
            self._post(now + self._plan.patience, lambda now: self._give_up(arrival, now))
        self._attempt(arrival, now)

    def _attempt(self, arrival: Arrival, now: float) -> None:
        """Offer a request to the replicas in the router's order, until one takes it."""
        if arrival.failed:
            return
        if not self._engines:  # it waits until there is one
            self._post(now + self._plan.noticed, lambda now: self._attempt(arrival, now))
            return
        arrival.attempts += 1
        if self._ring_is_old:  # many that come or go at once are one change
            self._ring.update(list(self._engines))
            self._ring_is_old = False
        ranked = self._ring.order(
            arrival.key, lambda name: self._engines[name].load, arrival.avoid, affinity=self._plan.affinity
        )
        for name in itertools.islice(ranked, 3):
            text = Text(arrival.prompt, arrival.new, arrival.blocks, emitted=arrival.emitted)
            if self._engines[name].offer(text, now):
                self._at[name][text] = arrival
                arrival.place = (name, text)
                self._arm(name, now)
                return
        self._over(arrival, "refused", now)

    def _ended(self, name: str, text: Text, at: float) -> None:
        arrival = self._at[name].pop(text)
        if arrival.first is None:
            arrival.first = text.first
        arrival.last, arrival.place = at, None
        self._open -= 1

    def _over(self, arrival: Arrival, why: str, now: float) -> None:
        arrival.failed = why
        self._open -= 1

    def _give_up(self, arrival: Arrival, now: float) -> None:
        """A client that has no token yet leaves."""
        if arrival.failed or arrival.first is not None:
            return
        if arrival.place is not None:
            name, text = arrival.place
            self._engines[name].settle(now)
            if text.generated:
                return
            del self._at[name][text]
            self._engines[name].cancel(text, now)
            self._arm(name, now)
        self._over(arrival, "gave up", now)

    # ── replicas ────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, now: float) -> None:
        name = f"replica {next(self._names)}"
        self._at[name] = {}
        self._engines[name] = SimulatedEngine(
            self._clock,
            lambda text, at, name=name: self._ended(name, text, at),
            max_sequences=self._plan.max_sequences,
            blocks=self._plan.blocks,
        )
        self._ring_is_old = True

    def _arm(self, name: str, now: float) -> None:
        """Make a replica continue when its step ends."""
        engine = self._engines[name]
        if engine.next == float("inf"):
            engine.next = now
        if self._wake.get(name) != engine.next:
            self._wake[name] = engine.next
            self._post(engine.next, lambda at: self._step(name, at))

    def _step(self, name: str, now: float) -> None:
        engine = self._engines.get(name)
        if engine is None or now < engine.next:
            return  # it died, or its run of steps was planned again
        self._wake.pop(name, None)
        engine.advance(now)
        if engine.next < float("inf"):
            self._arm(name, now)

    def _fail_one(self, now: float) -> None:
        if self._engines:
            self._die(self._random.choice(list(self._engines)), now)
        self._post(now + self._random.expovariate(self._plan.failures), self._fail_one)

    def _fail_share(self, share: float, now: float) -> None:
        for name in self._random.sample(list(self._engines), round(share * len(self._engines))):
            self._die(name, now)

    def _die(self, name: str, now: float) -> None:
        """A replica dies with all its state; sent tokens stay sent."""
        self.deaths += 1
        engine = self._engines[name]
        engine.settle(now)
        del self._engines[name]
        queued = self._at.pop(name)
        self.retired.append(engine)
        self._ring_is_old = True
        self._post(now + self._plan.restart, self._start)
        for text, arrival in queued.items():
            arrival.place = None
            if text.generated and arrival.first is None:
                arrival.first = text.first
            arrival.emitted += text.generated
            arrival.avoid.add(name)
            self._post(now + self._plan.noticed, lambda now, arrival=arrival: self._again(arrival, now))

    def _again(self, arrival: Arrival, now: float) -> None:
        """A loss was noticed: as the ingress has it, within the attempts of a request and the budget of all."""
        if arrival.failed:
            return
        if arrival.attempts >= self._plan.options.attempts:
            self._over(arrival, "attempts", now)
        elif self._plan.budget and not self._budget.withdraw():
            self.exhausted += 1
            self._over(arrival, "budget", now)
        else:
            self.retries += 1
            self._attempt(arrival, now)
