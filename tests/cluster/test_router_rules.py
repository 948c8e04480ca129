"""Requests with the same beginning go to the same replica, unless it is overloaded."""

import json
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.cluster.router import HashRing, routing_key

NAMES = [f"replica {at}" for at in range(8)]


def ring_of(names: list[str]) -> HashRing:
    ring = HashRing()
    ring.update(names)
    return ring


def idle(_: str) -> float:
    return 0.0


@given(st.sets(st.sampled_from(NAMES), min_size=1), st.text(), st.sets(st.sampled_from(NAMES)))
def test_every_replica_is_listed_once_and_avoided_ones_last(names: set[str], key: str, avoid: set[str]) -> None:
    ring = ring_of(sorted(names))
    for affinity in (True, False):
        order = list(ring.order(key, idle, avoid, affinity=affinity))
        assert sorted(order) == sorted(names)
        assert [name in avoid for name in order] == sorted(name in avoid for name in order)


def test_an_empty_ring_has_no_replicas() -> None:
    assert list(HashRing().order("key", idle)) == []


@given(st.lists(st.text(), min_size=1, max_size=50, unique=True), st.sampled_from(NAMES))
def test_only_the_keys_of_a_leaving_replica_move(keys: list[str], leaves: str) -> None:
    before, after = ring_of(NAMES), ring_of([name for name in NAMES if name != leaves])
    for key in keys:
        first, second, *_ = before.order(key, idle)
        assert next(after.order(key, idle)) == (second if first == leaves else first)


def test_keys_spread() -> None:
    ring = ring_of(NAMES)
    owners = Counter(next(ring.order(f"key {at}", idle)) for at in range(8000))
    assert set(owners) == set(NAMES)
    assert max(owners.values()) < 2000, "twice the mean: 64 places leave an eighth of standard deviation"


def test_a_common_key_does_not_overload_one_replica() -> None:
    ring, loads = ring_of(NAMES), Counter[str]()
    for _ in range(800):
        loads[next(ring.order("the same", loads.__getitem__))] += 1
    assert max(loads.values()) == 100, "the mean"


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9), min_size=1), st.text())
def test_idle_replicas_are_first_then_those_below_the_mean(loads: dict[str, int], key: str) -> None:
    ring = ring_of(sorted(loads))
    around = list(ring.order(key, idle))
    first = next(ring.order(key, loads.__getitem__))
    mean = (sum(loads.values()) + 1) / len(loads)
    below = [name for name in around if (loads[name] < mean if all(loads.values()) else loads[name] == 0)]
    assert first == below[0]


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9), min_size=1), st.text())
def test_a_session_stays_while_its_replica_is_below_1_25_times_the_mean(loads: dict[str, int], name: str) -> None:
    ring, key = ring_of(sorted(loads)), f"session {name}"
    around = list(ring.order(key, idle))
    bound = math.ceil(1.25 * (sum(loads.values()) + 1) / len(loads))
    assert next(ring.order(key, loads.__getitem__)) == next(name for name in around if loads[name] < bound)


def test_without_a_key_the_least_loaded_is_first_and_ties_rotate() -> None:
    ring = ring_of(NAMES)
    loads = dict.fromkeys(NAMES, 3.0) | {NAMES[2]: 1.0}
    assert next(ring.order(None, loads.__getitem__)) == NAMES[2]
    assert next(ring.order("key", loads.__getitem__, affinity=False)) == NAMES[2]
    assert {next(ring.order(None, idle)) for _ in NAMES} == set(NAMES)


def key_of(headers: dict[str, str] | None = None, **body: Any) -> str | None:
    return routing_key(headers or {}, json.dumps(body).encode())


def test_turns_of_a_conversation_have_one_key() -> None:
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}
    turn = key_of(model="demo", messages=[system, first])
    later = [system, first, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And?"}]
    assert turn is not None
    assert key_of(model="demo", messages=later, temperature=0) == turn
    assert key_of(model="other", messages=later) != turn
    assert key_of(model="demo", messages=[system, {"role": "user", "content": "Bye."}]) != turn
    assert key_of(model="demo", input="Hello.") == key_of(model="demo", prompt="Hello.")


def test_prompts_with_a_common_start_have_one_key() -> None:
    shared = "A long document. " * 200
    assert key_of(prompt=shared + "One?") == key_of(prompt=shared + "Two?")
    assert key_of(prompt=[*range(600), 1]) == key_of(prompt=[*range(600), 2])
    assert key_of(prompt=[1, 2]) != key_of(prompt=[1, 3])


def test_a_session_is_a_key() -> None:
    headers = {"x-session-id": "s1"}
    assert key_of(headers, prompt="a") == key_of(headers, prompt="b") != key_of(prompt="a")


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"{}", b'{"messages": 3}', b"\xff", b"[" * 100_000])
def test_short_prompts_have_no_key(body: bytes) -> None:
    assert routing_key({}, body) is None
