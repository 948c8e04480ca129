"""A replica is killed, hangs or is removed in the middle of a text, and the client gets the uninterrupted text."""

import contextlib
import json
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from benchmarks.replicas import wait_for_replicas
from streams import STORY, Stream, check_same, free_port, read, signal_it, undisturbed

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    from ray import serve

    from onward.cluster.deployment import replicas_of, running
    from onward.cluster.options import DeployOptions

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

OPTIONS = DeployOptions(replicas=3, threads=1, retries={"silence": 4.0, "quarantine": 0.0})
BODIES: dict[str, dict[str, Any]] = {
    "greedy": STORY | {"temperature": 0},
    "sampled with logprobs": STORY | {"logprobs": 2, "temperature": 1.0, "stream_options": {"include_usage": True}},
    "penalties and several texts": STORY
    | {"n": 2, "frequency_penalty": 0.4, "presence_penalty": 0.2, "max_tokens": 200},
    "a stop string": STORY | {"stop": ["zzz", "Bogar was very happy"]},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 300}}, "required": ["a"]}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "max_tokens": 300,
    "seed": 3,
    "temperature": 1.0,
    "stream": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running(OPTIONS, port=(free := free_port())):
        yield free


@pytest.fixture(autouse=True)
def all_there(request: pytest.FixtureRequest) -> None:
    """Each test begins with all replicas."""
    if "port" in request.fixturenames:
        wait_for_replicas(OPTIONS.replicas)


@pytest.mark.parametrize("at", [1, 2, 30, 90])
def test_a_replica_is_killed(port: int, at: int) -> None:
    expected = undisturbed(port, STORY)
    assert len(expected.events) > 100, "tokens that come together are one event"
    got = read(port, STORY, at, signal_it(signal.SIGKILL))
    check_same(got, expected)


def test_replicas_are_killed_while_idle(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between streams, with no channel open or an unused one, and as requests arrive: no death waits for a silence."""
    monkeypatch.setattr("onward.cluster.channel._IDLE_TIMEOUT", 1.0)
    caplog.set_level(logging.INFO, logger="onward.server")
    for turn, (unused, delay) in enumerate([(0.0, 0.0), (3.0, 0.0), (3.0, 0.02), (0.0, 0.05)]):
        wait_for_replicas(OPTIONS.replicas)
        bodies = [STORY | {"prompt": f"{turn} {at} Once upon a time", "max_tokens": 60} for at in range(5)]
        expected = [undisturbed(port, body) for body in bodies]
        time.sleep(unused)
        killing = threading.Timer(delay, os.kill, [expected[0].pid, signal.SIGKILL])
        killing.start()
        if not delay:
            killing.join()
        with ThreadPoolExecutor(len(bodies)) as pool:
            got = list(pool.map(lambda body: read(port, body), bodies))
        for one, other in zip(got, expected, strict=True):
            check_same(one, other)
    lost = [json.loads(record.getMessage()) for record in caplog.records if "replica lost" in record.getMessage()]
    assert not [line for line in lost if "silent" in line["reason"]]


@pytest.mark.parametrize("kind", BODIES)
def test_every_feature_survives_a_lost_replica(port: int, kind: str) -> None:
    expected = undisturbed(port, BODIES[kind])
    got = read(port, BODIES[kind], len(expected.events) // 3, signal_it(signal.SIGKILL))
    check_same(got, expected)


def test_a_json_chat_survives_a_lost_replica(port: int) -> None:
    path = "/v1/chat/completions"
    expected = undisturbed(port, CHAT, path=path)
    got = read(port, CHAT, 20, signal_it(signal.SIGKILL), path=path)
    check_same(got, expected)


@pytest.mark.parametrize("at", [1, 60])
def test_a_replica_hangs(port: int, at: int) -> None:
    expected = undisturbed(port, STORY)
    got = read(port, STORY, at, signal_it(signal.SIGSTOP))
    with contextlib.suppress(ProcessLookupError):
        os.kill(got.pid, signal.SIGKILL)
    check_same(got, expected)


def test_a_replica_hangs_before_the_first_token(port: int) -> None:
    expected = undisturbed(port, STORY)
    os.kill(expected.pid, signal.SIGSTOP)  # requests of one beginning go there
    try:
        got = read(port, STORY)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(expected.pid, signal.SIGKILL)
    check_same(got, expected)
    assert got.replica != expected.replica


def test_many_streams_lose_their_replica_at_once(port: int) -> None:
    bodies = [STORY | {"seed": seed, "temperature": 1.0} for seed in range(12)]
    expected = [undisturbed(port, body) for body in bodies]
    got: list[Stream | None] = [None] * len(bodies)
    once = threading.Lock()

    def kill(stream: Stream) -> None:
        if once.acquire(blocking=False):
            os.kill(stream.pid, signal.SIGKILL)

    def ask(at: int) -> None:
        got[at] = read(port, bodies[at], 20, kill)

    threads = [threading.Thread(target=ask, args=[at]) for at in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(got, expected, strict=True):
        assert one is not None
        check_same(one, other)


def test_replaced_replicas_hand_over(port: int) -> None:
    expected = undisturbed(port, STORY)

    def replace_all(stream: Stream) -> None:
        """Deploy again with another setting: all replicas are replaced, one after the other."""
        options = DeployOptions(**{**vars(OPTIONS), "settings": {"limits": {"prompts": 255}}})
        thread = threading.Thread(
            target=lambda: serve.run(replicas_of(options), name="onward", route_prefix=None, blocking=False)
        )
        thread.start()
        threads.append(thread)

    threads: list[threading.Thread] = []
    first = read(port, STORY, 5, replace_all)
    check_same(first, expected)
    while threads[0].is_alive():
        got = read(port, STORY)
        check_same(got, expected)
    threads[0].join()
    check_same(undisturbed(port, STORY), expected)
