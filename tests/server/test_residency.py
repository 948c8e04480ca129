"""The policy for models on demand, at random: limits hold, models in use stay loaded, all get a turn."""

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onward.server.residency import Residency

NAMES = "abcde"
TTL, PATIENCE = 30.0, 5.0


class Server(RuleBasedStateMachine):
    """A server that does what the policy decides. waiting, using: numbers of requests by model."""

    @hypothesis.stateful.initialize(
        max_models=st.integers(1, 3),
        memory=st.integers(5, 30),
        sizes=st.lists(st.integers(1, 12), min_size=len(NAMES), max_size=len(NAMES)),
        fixed=st.integers(0, 5),
    )
    def begin(self, max_models: int, memory: int, sizes: list[int], fixed: int) -> None:
        self.policy = Residency(max_models, memory, TTL, fixed, PATIENCE)
        self.sizes = dict(zip(NAMES, sizes, strict=True))
        self.now = 0.0
        self.waiting, self.using = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
        self.last_use = dict.fromkeys(NAMES, 0.0)
        self.loading: str | None = None
        self.unloading: set[str] = set()

    def step(self) -> None:
        idle = {name for name in self.policy.residents if self.policy.is_idle(name)}
        unload, load, ready = self.policy.step(self.now)
        for name, reason in unload:
            assert not self.using[name], "never while it serves"
            assert name in idle
            idle.remove(name)
            if reason == "idle":
                assert self.now - self.last_use[name] >= TTL
            else:
                unclaimed = [each for each in idle if not self.waiting[each]]
                assert all(self.last_use[name] <= self.last_use[each] for each in unclaimed), "the least recently used"
            self.unloading.add(name)
        if load is not None:
            assert self.loading is None
            assert self.waiting[load]
            self.loading = load
        for name in ready:
            assert name != self.loading
            assert name not in self.unloading
            self.begin_queued(name)

    def begin_queued(self, name: str) -> None:
        self.using[name] += self.waiting[name]
        self.waiting[name], self.last_use[name] = 0, self.now

    @rule(name=st.sampled_from(NAMES))
    def request(self, name: str) -> None:
        if self.policy.request(name, self.sizes[name], self.now):
            self.using[name] += 1
            self.last_use[name] = self.now
        else:
            self.waiting[name] += 1
        self.step()

    @precondition(lambda self: any(self.using.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in NAMES if self.using[name]]))
        self.using[name] -= 1
        self.last_use[name] = self.now
        self.policy.finish(name, self.now)
        self.step()

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in NAMES if self.waiting[name]]))
        self.waiting[name] -= 1
        self.policy.leave(name)
        self.step()

    @precondition(lambda self: self.loading)
    @rule(fails=st.booleans())
    def load_ends(self, fails: bool) -> None:
        name, self.loading = self.loading, None
        if fails:
            for _ in range(self.waiting[name]):
                self.policy.leave(name)
            self.waiting[name] = 0
            self.policy.failed(name)
        else:
            self.policy.loaded(name, self.sizes[name], self.now)
            self.begin_queued(name)
        self.step()

    @precondition(lambda self: self.unloading)
    @rule(data=st.data())
    def unload_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.unloading)))
        self.unloading.remove(name)
        self.policy.unloaded(name)
        self.step()

    @rule(seconds=st.sampled_from([0.1, 1.0, PATIENCE, TTL]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    @rule(name=st.sampled_from(NAMES))
    def evict(self, name: str) -> None:
        if self.policy.evict(name):
            assert not self.using[name]
            self.unloading.add(name)
        self.step()

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "policy"):
            return
        residents = self.policy.residents
        nbytes = self.policy.fixed + sum(each.nbytes for each in residents.values())
        assert len(residents) <= self.policy.max_models
        assert nbytes <= self.policy.memory or len(residents) <= 1, "one alone may exceed it"

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "policy"):
            return
        for name in NAMES:
            resident, queued = self.policy.residents.get(name), self.policy.queue.get(name)
            assert (resident.users if resident else 0) == self.using[name]
            assert (queued.requests if queued else 0) == self.waiting[name]
            if self.using[name]:
                assert resident is not None
                assert resident.status == "loaded"

    @invariant()
    def no_request_waits_without_reason(self) -> None:
        """While requests wait, a model is on its way in or out, or one that serves is in the way."""
        if hasattr(self, "policy") and any(self.waiting.values()):
            assert self.loading or self.unloading or any(self.using.values())

    def teardown(self) -> None:
        """If all requests end in time, every queued one gets its turn."""
        if not hasattr(self, "policy"):
            return
        for _ in range(50 * len(NAMES)):
            for name in sorted(self.unloading):
                self.unloading.remove(name)
                self.policy.unloaded(name)
            if self.loading:
                self.load_ends(False)
            for name in NAMES:
                while self.using[name]:
                    self.using[name] -= 1
                    self.policy.finish(name, self.now)
                    self.last_use[name] = self.now
            self.step()
        assert not any(self.waiting.values())


Server.TestCase.settings = hypothesis.settings(max_examples=200, stateful_step_count=60, deadline=None)
TestResidency = Server.TestCase


def _loaded(policy: Residency, name: str, now: float) -> None:
    assert policy.step(now).load == name
    policy.loaded(name, 1, now)
    assert policy.residents[name].users
    policy.step(now)


def test_a_busy_model_yields_to_one_that_has_waited() -> None:
    policy = Residency(max_models=1, memory=10, ttl=TTL, patience=PATIENCE)
    policy.request("a", 1, 0.0)
    _loaded(policy, "a", 0.0)
    policy.request("b", 1, 1.0)
    assert policy.step(1.0) == ([], None, [])
    assert policy.request("a", 1, 2.0), "at first, it continues"
    policy.step(1.0 + PATIENCE)
    assert not policy.request("a", 1, 7.0), "then, its next request waits for its turn"
    policy.finish("a", 8.0)
    assert policy.step(8.0) == ([], None, [])
    policy.finish("a", 9.0)
    assert policy.step(9.0) == ([("a", "room")], None, [])
    policy.unloaded("a")
    _loaded(policy, "b", 10.0)
    assert list(policy.queue) == ["a"]


def test_a_busy_model_accepts_requests_again_when_the_waiting_one_leaves() -> None:
    policy = Residency(max_models=1, memory=10, ttl=TTL, patience=PATIENCE)
    policy.request("a", 1, 0.0)
    _loaded(policy, "a", 0.0)
    policy.request("b", 1, 1.0)
    policy.step(10.0)
    assert not policy.request("a", 1, 10.0)
    policy.leave("b")
    assert policy.step(11.0).ready == ["a"]


def test_a_model_larger_than_estimated_unloads_idle_ones() -> None:
    policy = Residency(max_models=3, memory=10, ttl=TTL)
    for at, name in enumerate("abc"):
        policy.request(name, 3, at)
        policy.step(at)
        policy.loaded(name, 3, at)
        policy.step(at)
    policy.finish("b", 4.0)
    policy.finish("a", 5.0)
    assert policy.step(5.0).unload == []
    policy.residents["c"].nbytes = 6
    assert policy.step(6.0).unload == [("b", "room")]
