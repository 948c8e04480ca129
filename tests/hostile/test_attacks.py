"""Any request of one client gets a fitting answer, others are served meanwhile, and all resources are released."""

import os

import pytest
from tests.hostile.attacks import ATTACKS, Attack
from tests.hostile.program import Standing
from tests.hostile.running import run

FULL = os.environ.get("ONWARD_TESTS") == "full"
pytestmark = [pytest.mark.strength(0), pytest.mark.timeout(1200 if FULL else 300)]

PLAIN = [attack for attack in ATTACKS if attack.is_plain]
OTHERS = [attack for attack in ATTACKS if not attack.is_plain]
# Attacks by several clients that count as one: without keys, all have one address.
TOGETHER = [attack for attack in ATTACKS if attack.clients > 1 and attack.model == "demo"]


@pytest.mark.parametrize("model", sorted({attack.model for attack in PLAIN}))
def test_small_requests(keyed: Standing, model: str) -> None:
    """Sequentially, since each must finish quickly."""
    outcome = run(keyed, model, [attack for attack in PLAIN if attack.model == model])
    assert not outcome.problems, "\n".join(outcome.problems)


@pytest.mark.stride(4)
@pytest.mark.parametrize("attack", OTHERS, ids=lambda attack: attack.name)
def test_large_odd_and_concurrent_requests(keyed: Standing, attack: Attack) -> None:
    outcome = run(keyed, attack.name, [attack])
    assert not outcome.problems, "\n".join(outcome.problems)


def test_without_keys(keyless: Standing) -> None:
    """One test, so that one process starts this server. By default every tenth of them."""
    outcomes = [run(keyless, attack.name, [attack]) for attack in TOGETHER[:: 1 if FULL else 10]]
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    assert not problems, "\n".join(problems)
