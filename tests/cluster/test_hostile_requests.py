"""Hostile requests through the ingress: it answers as `onward serve` does, and all resources are released."""

import json
import time
from collections.abc import Iterator

import pytest
from streams import deployed
from tests.hostile.attacks import ATTACKS
from tests.hostile.neighbours import PATIENCE, Neighbours
from tests.hostile.program import IDLE_SECONDS, KEYS
from tests.hostile.running import answer_problem, sent
from tests.hostile.sending import Target, ask, whole
from tests.hostile.test_fuzz import Fuzzed, drawn

pytest.importorskip("ray")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

BODIES = 40  # of each kind
OF_DEMO = [attack for attack in ATTACKS if attack.model == "demo"]
# A tenth of the attacks, since servers are tested with all of them, and half of those on the ingress's connections.
CHOSEN = [attack for attack in OF_DEMO if attack.send is whole][::10]
CHOSEN += [attack for attack in OF_DEMO if attack.send is not whole][::2]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    keys = [part for key in KEYS for part in ("--api-key", key)]
    with deployed("--no-access-log", *keys) as (port, _):
        yield Target(port, KEYS[0])


@pytest.fixture(autouse=True)
def with_neighbours(target: Target) -> Iterator[None]:
    """They are answered meanwhile, and afterwards all sequences and blocks are back."""
    with Neighbours(target.port, 0, KEYS[1]) as neighbours:
        neighbours.begin("demo")
        try:
            yield
        finally:
            waits = neighbours.end()
    assert not waits.faults
    assert all(waits.worst(kind) < PATIENCE for kind in waits.seconds)
    end = time.monotonic() + IDLE_SECONDS
    while busy := _running(target):
        assert time.monotonic() < end, busy
        time.sleep(0.1)


def _running(target: Target) -> dict[str, int]:
    answer = ask(target, "/stats", None, method="GET")
    assert answer.status == 200, answer
    names = ("waiting", "running", "sequences", "waiting_tokens", "blocks_used")
    return {name: each[name] for each in json.loads(answer.body).values() for name in names if each[name]}


def test_attacks(target: Target) -> None:
    problems = []
    for attack in CHOSEN:
        answers = sent(target, attack, attack.bodies())
        found = dict.fromkeys(filter(None, (answer_problem(attack, answer) for answer in answers)))
        problems += [f"{attack.name}: {problem}" for problem in found]
    assert not problems, "\n".join(problems)


def test_documented_bodies(target: Target) -> None:
    fuzzed = Fuzzed(target)
    drawn(fuzzed.sound(), BODIES, lambda each: fuzzed.send(*each))
    drawn(fuzzed.hostile(), BODIES, lambda each: fuzzed.send(*each))
    assert fuzzed.answered[200]
