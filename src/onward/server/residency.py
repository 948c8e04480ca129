"""Which models on demand are in memory: a policy without threads, clocks or input and output.

Requests take turns by model, in the order in which the models were first asked for. A model is loaded when it fits
within the limits, or when it would be alone. Room is made by unloading idle models, the least recently used first;
a model that serves requests is never unloaded. When a model has waited for `patience` seconds, models that are busy
stop taking new requests, which wait for their next turn: a stream of requests cannot keep another model out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Resident:
    """A model in memory, or on its way in or out.

    nbytes: of its weights and cache. status: "loading", "loaded" or "unloading". users: its requests. used: when it was
    last in use. yields: whether new requests wait until another model has had its turn.
    """

    nbytes: int
    status: str
    users: int = 0
    used: float = 0.0
    yields: bool = False


@dataclass
class Queued:
    """A model that requests wait for. nbytes: that it will take. since: when the first one came."""

    nbytes: int
    since: float
    requests: int = 0


class Step(NamedTuple):
    """The decisions of `Residency.step`. unload: names, each with the reason "idle" or "room". load: the model
    to load. ready: models whose queued requests begin, since they no longer have to give way."""

    unload: list[tuple[str, str]]
    load: str | None
    ready: list[str]


@dataclass
class Residency:
    """The models in memory, and those that requests wait for. The caller holds a lock, and passes the time in seconds.

    max_models: that are in memory at once. memory: bytes of all. ttl: seconds after which an idle model is unloaded.
    fixed: bytes that other models take, always. patience: see the module. is_working: whether a model without requests
    generates nevertheless, for example a response whose client has left.
    """

    max_models: int
    memory: int
    ttl: float
    fixed: int = 0
    patience: float = 5.0
    is_working: Callable[[str], bool] = lambda name: False
    residents: dict[str, Resident] = field(default_factory=dict)
    queue: dict[str, Queued] = field(default_factory=dict)  # the oldest first

    def request(self, name: str, nbytes: int, now: float) -> bool:
        """A request for a model arrives. Returns whether it may begin; otherwise it is queued. nbytes: that the model
        takes, if it is not in memory."""
        if self._may_begin(name):
            resident = self.residents[name]
            resident.users, resident.used = resident.users + 1, now
            return True
        self.queue.setdefault(name, Queued(nbytes, now)).requests += 1
        return False

    def leave(self, name: str) -> None:
        """A queued request leaves. A load that has begun goes on."""
        queued = self.queue[name]
        queued.requests -= 1
        if not queued.requests:
            del self.queue[name]

    def finish(self, name: str, now: float) -> None:
        """A request that began has ended."""
        resident = self.residents[name]
        resident.users, resident.used = resident.users - 1, now

    def loaded(self, name: str, nbytes: int, now: float) -> None:
        """A model has been loaded, and all its queued requests begin. nbytes: that it takes."""
        resident = self.residents[name]
        resident.status, resident.nbytes = "loaded", nbytes
        self._begin(name, now)

    def failed(self, name: str) -> None:
        """A model could not be loaded. Its queued requests have left."""
        del self.residents[name]

    def is_idle(self, name: str) -> bool:
        """Whether a model is in memory, and nobody uses it."""
        resident = self.residents.get(name)
        is_free = resident is not None and resident.status == "loaded" and not resident.users
        return is_free and not self.is_working(name)

    def evict(self, name: str) -> bool:
        """Unload a model if it is idle. Returns whether it is."""
        if not self.is_idle(name):
            return False
        self.residents[name].status = "unloading"
        return True

    def broken(self, name: str) -> None:
        """Unload a model that no longer works. Its requests have failed, and don't `finish`."""
        resident = self.residents[name]
        resident.status, resident.users = "unloading", 0

    def unloaded(self, name: str) -> None:
        """A model's memory has been freed."""
        del self.residents[name]

    def step(self, now: float) -> Step:
        """Decide what to do next. The models to load and to unload count as such from now on."""
        unload = [(name, "idle") for name, each in self.residents.items() if self._has_expired(name, each, now)]
        for name, _ in unload:
            self.evict(name)
        load = None
        for resident in self.residents.values():
            resident.yields = False
        absent = next((name for name in self.queue if name not in self.residents), None)
        victims = self._victims(absent, now)
        for name in victims:
            if self.evict(name):
                unload.append((name, "room"))
            else:
                self.residents[name].yields = True
        is_loading = any(each.status == "loading" for each in self.residents.values())
        if absent is not None and not is_loading and self._fits(absent, list(self.residents)):
            load = absent
            self.residents[load] = Resident(self.queue[load].nbytes, "loading", used=now)
        ready = [name for name in self.queue if self._may_begin(name)]
        for name in ready:
            self._begin(name, now)
        return Step(unload, load, ready)

    def _has_expired(self, name: str, resident: Resident, now: float) -> bool:
        return name not in self.queue and now - resident.used >= self.ttl and self.is_idle(name)

    def _may_begin(self, name: str) -> bool:
        resident = self.residents.get(name)
        return resident is not None and resident.status == "loaded" and not resident.yields

    def _fits(self, name: str | None, others: list[str]) -> bool:
        """Whether the limits permit a model beside these. None: whether they permit these alone."""
        count, nbytes = len(others), sum(self.residents[each].nbytes for each in others)
        if name is not None:
            count, nbytes = count + 1, nbytes + self.queue[name].nbytes
        return count <= 1 or (count <= self.max_models and self.fixed + nbytes <= self.memory)

    def _victims(self, absent: str | None, now: float) -> list[str]:
        """The models to unload, so that another one fits, or so that these do; none if that doesn't help it yet."""
        rest = [name for name, each in self.residents.items() if each.status != "unloading"]
        loaded = sorted((name for name in rest if self.residents[name].status == "loaded"), key=self._last_use)
        victims = [name for name in loaded if name not in self.queue and self.is_idle(name)]
        if absent is not None and now - self.queue[absent].since >= self.patience:
            victims += [name for name in loaded if name not in victims]
        for count in range(len(victims) + 1):
            if self._fits(absent, [name for name in rest if name not in victims[:count]]):
                return victims[:count]
        return victims if absent is None else []

    def _last_use(self, name: str) -> float:
        return self.residents[name].used

    def _begin(self, name: str, now: float) -> None:
        """Let the queued requests of a loaded model begin."""
        resident = self.residents[name]
        resident.used = now
        if name in self.queue:
            resident.users += self.queue.pop(name).requests
