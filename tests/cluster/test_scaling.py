"""Replicas are added when the load exceeds the capacity of those that exist."""

import threading
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
from streams import STORY, free_port, read

from onward.cluster.router import LOAD, desired_replicas, load_of
from onward.engine import EngineStats

IDLE = EngineStats(
    waiting=0,
    running=0,
    sequences=0,
    waiting_tokens=0,
    blocks=100,
    blocks_used=0,
    blocks_cached=0,
    blocks_free=100,
    hit_rate=0.0,
    tokens_per_second=0.0,
    prompt_tokens_per_second=0.0,
    steps=0,
    tokens=0,
    preemptions=0,
)


def test_the_load_of_a_replica() -> None:
    assert load_of(IDLE, 8) == 0.0
    assert load_of(replace(IDLE, running=4, waiting=8), 8) == 1.5
    few_long = replace(IDLE, running=2, waiting=2, waiting_tokens=40_000, prompt_tokens_per_second=1_000.0)
    assert load_of(few_long, 8) == 2 / 8 + 4.0, "prompts of 40 s are four replicas' work"
    assert load_of(replace(few_long, prompt_tokens_per_second=0.0), 8) == 0.5


def test_total_load_determines_the_number_of_replicas() -> None:
    context = SimpleNamespace(aggregated_metrics={LOAD: {"a": 1.5, "b": 0.75}})
    assert desired_replicas(context) == (2.25, {})
    assert desired_replicas(SimpleNamespace(aggregated_metrics={})) == (0, {})


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
def test_a_replica_is_added() -> None:
    pytest.importorskip("ray")
    with warnings.catch_warnings(action="ignore"):  # of Ray's own
        from ray import serve

        from onward.cluster.deployment import running
        from onward.cluster.options import DeployOptions
    options = DeployOptions(replicas=1, max_replicas=2, threads=1, engine={"max_sequences": 2})
    over = threading.Event()

    def ask(port: int) -> None:
        while not over.is_set():
            read(port, STORY | {"ignore_eos": True})

    with running(options, port=(port := free_port())):
        threads = [threading.Thread(target=ask, args=[port]) for _ in range(6)]
        for thread in threads:
            thread.start()
        try:
            end = time.monotonic() + 120
            while time.monotonic() < end:
                state = serve.status().applications["onward"].deployments["Replica"]
                if state.replica_states.get("RUNNING") == 2:
                    break
                time.sleep(0.5)
            assert state.replica_states.get("RUNNING") == 2, "three requests for each place want another replica"
        finally:
            over.set()
            for thread in threads:
                thread.join()
