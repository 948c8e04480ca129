"""An answer from several attempts equals that of a single attempt, whenever a replica is lost."""

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.cluster import ingress as ingress_module
from onward.cluster.call import ProxiedRequest, ReplicaLostError, Reply, RouteAttempt
from onward.cluster.channel import ReplyQueue, serve_into
from onward.cluster.ingress import Ingress, RetryOptions
from onward.server import Settings

EVENTS = [f"data: {at}\n\n".encode() for at in range(6)]
STREAM = b"".join(EVENTS)
SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    """An application whose events come one at a time, with comments between, after the last one that was sent."""
    assert (await receive())["body"] == b"body"
    begun = scope["onward"]
    (known,) = begun.get("emitted") or [()]
    first = len(known)
    assert list(known) == list(range(first)), "it knows the emitted tokens"
    assert list(begun["ended"]) == ([0] if first == len(EVENTS) else [])
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for at in range(first, len(EVENTS)):
        progress = {"emitted": [[at]], "ended": [0] if at == len(EVENTS) - 1 else []}
        body = b": waiting\n\n" + EVENTS[at]
        await send({"type": "http.response.body", "body": body, "more_body": True, "onward": progress})
        await asyncio.sleep(0.002)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def whole(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b'{"a": ', "more_body": True})
    await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"1}", "more_body": False})


async def busy(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 429, "headers": [(b"retry-after", b"1")]})
    await send({"type": "http.response.body", "body": b"busy", "more_body": False})


async def served(app: Any, call: ProxiedRequest, name: str, fingerprint: str) -> AsyncGenerator[Reply, None]:
    """The items that a replica sends for a call."""
    queue = ReplyQueue(name, fingerprint, gather=0.0)
    serving = asyncio.ensure_future(serve_into(app, call, 0, queue))
    batches = queue.batches()
    try:
        async for batch in batches:
            messages = [message for item in batch.items for message in item.messages]
            is_last = any(item.is_last for item in batch.items)
            yield Reply(name, fingerprint, tuple(messages), is_last)
            if is_last:
                return
    finally:
        await batches.aclose()
        serving.cancel()


Fault = tuple[str, int]  # the fault, and the number of items before it


class Fakes:
    """Replicas in this process. faults: of each attempt in turn; further attempts have none."""

    def __init__(
        self, faults: list[Fault], names: tuple[str, ...] = ("a", "b", "c", "d"), apps: dict[str, Any] | None = None
    ) -> None:
        self.faults, self.all, self.apps = list(faults), names, apps or {}
        self.gone: set[str] = set()
        self.calls: list[tuple[str, ProxiedRequest]] = []
        self.fingerprints: dict[str, str] = {}
        self.seeking = 0.0  # seconds until a call has a replica
        self.reading = 0.0  # and from then to its first item
        self.app: Callable[..., Any] = streaming

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.all) - self.gone

    async def serve(self, call: ProxiedRequest, route: RouteAttempt) -> AsyncGenerator[Reply, None]:
        name = min(self.names, key=lambda name: (name in route.avoid, name))
        await asyncio.sleep(self.seeking)
        route.assign(name)
        self.calls.append((name, call))
        fault, after = self.faults.pop(0) if self.faults else ("", 0)
        count = 0
        app, fingerprint = self.apps.get(name, self.app), self.fingerprints.get(name, "same")
        await asyncio.sleep(self.reading)
        async for item in served(app, call, name, fingerprint):
            if fault and count == after:
                if fault == "die":
                    self.gone.add(name)
                    raise ReplicaLostError("died", died=True)
                if fault == "break off":
                    return
                if fault == "hang":
                    await asyncio.sleep(60)
                if fault == "leave":
                    self.gone.add(name)
            count += 1
            yield item


class Got:
    """The data that a client has received."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def send(self, message: Any) -> None:
        assert not self.messages or self.messages[-1].get("more_body", True), "nothing comes after the end"
        self.messages.append(message)

    @property
    def status(self) -> int:
        (status,) = [message["status"] for message in self.messages if message["type"] == "http.response.start"]
        return int(status)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def is_whole(self) -> bool:
        return self.messages[-1].get("more_body") is False


def ask(replicas: Fakes, **options: Any) -> Got:
    """Ask an ingress of its own. options: of `RetryOptions`."""
    return ask_at(Ingress(replicas, RetryOptions(**{"silence": 1.0, **options})))


def ask_at(ingress: Ingress, body: bytes = b"body", path: str = "/v1/completions", **headers: str) -> Got:
    got = Got()
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

    async def run() -> None:
        bodies = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop()
            return await asyncio.Event().wait()

        await asyncio.wait_for(ingress({**SCOPE, "path": path, "headers": named}, receive, got.send), 60)

    asyncio.run(run())
    return got


def without_comments(body: bytes) -> bytes:
    return body.replace(b": waiting\n\n", b"")


@given(
    st.lists(st.tuples(st.sampled_from(["die", "break off", "leave"]), st.integers(0, 8)), max_size=3),
    st.sampled_from([streaming, whole]),
)
def test_the_client_gets_one_whole_answer_whatever_fails(faults: list[Fault], app: Any) -> None:
    replicas = Fakes(faults)
    replicas.app = app
    got = ask(replicas, attempts=4, quarantine=0.0, silence=10.0)  # a busy machine is no silent replica
    deaths = sum(fault == "die" for fault, _ in faults)
    if got.status == (200 if app is streaming else 201) and deaths < 2:
        assert without_comments(got.body) == (STREAM if app is streaming else b'{"a": 1}')
    assert got.is_whole
    assert len({call.response_key for _, call in replicas.calls}) == 1


def test_a_request_that_kills_two_replicas_is_refused_unless_served_between() -> None:
    replicas = Fakes([("die", 2), ("", 0), ("die", 3), ("", 0), ("die", 2), ("die", 2)], names=tuple("abcdefgh"))
    ingress = Ingress(replicas, RetryOptions())
    for _ in range(2):
        assert without_comments(ask_at(ingress).body) == STREAM
    assert b"two replicas died while serving this request" in ask_at(ingress).body
    count = len(replicas.calls)
    assert b"it is temporarily refused" in ask_at(ingress).body
    assert len(replicas.calls) == count


def test_the_silence_timeout_starts_with_the_replica() -> None:
    """Not when it began to look for one: a replica that was found late is not lost at once."""
    replicas = Fakes([])
    replicas.seeking, replicas.reading = 1.8, 0.6
    got = ask(replicas, silence=2.0)
    assert without_comments(got.body) == STREAM
    assert len(replicas.calls) == 1


@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("fault", ["die", "leave", "break off", "hang"])
@pytest.mark.stride(2)
def test_a_fault_at_every_position(fault: str, after: int) -> None:
    replicas = Fakes([(fault, after)])
    got = ask(replicas, silence=1.0 if fault == "hang" else 10.0)
    assert (got.status, without_comments(got.body)) == (200, STREAM)
    assert len(replicas.calls) <= 2
    assert len({name for name, _ in replicas.calls}) == len(replicas.calls), "another replica continues"


def test_a_leaving_replica_without_successor_serves_to_the_end() -> None:
    replicas = Fakes([("leave", 1)], names=("a",))
    assert without_comments(ask(replicas).body) == STREAM
    assert len(replicas.calls) == 1


def test_a_busy_replica_is_skipped_and_the_last_one_reports_it() -> None:
    replicas = Fakes([], apps={"a": busy, "b": busy})
    assert without_comments(ask(replicas).body) == STREAM
    assert [name for name, _ in replicas.calls] == ["a", "b", "c"]
    replicas = Fakes([], names=("a", "b"), apps={"a": busy, "b": busy})
    got = ask(replicas)
    assert (got.status, got.body) == (429, b"busy")


def test_a_started_answer_waits_if_all_others_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "_RETRY_DELAY", 0.01)
    for left in range(6):
        turns = itertools.count()

        async def busy_at_first(*asked: Any, left: int = left, turns: Iterator[int] = turns) -> None:
            await (busy if next(turns) < left else streaming)(*asked)

        replicas = Fakes([("die", 3)], names=("a", "b", "c"), apps={"b": busy_at_first, "c": busy_at_first})
        assert without_comments(ask(replicas).body) == STREAM
        assert [name for name, _ in replicas.calls] == ["a", *"bcbcbc"[: left + 1]]


def test_a_started_answer_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "_RETRY_DELAY", 0.01)
    monkeypatch.setattr(ingress_module, "_TIMEOUT", 0.05)
    replicas = Fakes([("die", 3)], names=("a", "b"), apps={"b": busy})
    assert b"the response cannot be completed" in ask(replicas).body
    assert len(replicas.calls) < 10


def test_a_busy_replica_is_waited_for_if_the_others_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "_RETRY_DELAY", 0.01)
    turns = itertools.count()

    async def busy_once(*asked: Any) -> None:
        await (streaming if next(turns) else busy)(*asked)

    replicas = Fakes([("die", 3)], names=("a", "b", "c"), apps={"b": busy_once})
    replicas.fingerprints = {"c": "other"}
    assert without_comments(ask(replicas).body) == STREAM
    assert [name for name, _ in replicas.calls] == ["a", "b", "c", "b"]


def test_an_answer_does_not_continue_with_another_fingerprint() -> None:
    replicas = Fakes([("die", 3)])
    replicas.fingerprints = {"b": "other", "c": "other"}
    got = ask(replicas)
    assert without_comments(got.body) == STREAM
    assert [name for name, _ in replicas.calls] == ["a", "b", "c", "d"]
    replicas = Fakes([("die", 3)], names=("a", "b"))
    replicas.fingerprints = {"b": "other"}
    got = ask(replicas)
    assert STREAM.startswith(without_comments(got.body).split(b'data: {"error"')[0])
    assert b"another model, build or processor" in got.body


def test_differing_replicas_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    replicas = Fakes([])
    replicas.fingerprints = {"a": "1-2-3-4-5-6", "b": "1-2-3-4-5-7", "c": "1-2-3-4-5-7"}
    ingress = Ingress(replicas, RetryOptions())
    with caplog.at_level(logging.INFO, logger="onward.server"):
        for replicas.gone in (set(), {"a"}, {"a", "b"}, set()):
            assert without_comments(ask_at(ingress).body) == STREAM
    assert [name for name, _ in replicas.calls] == ["a", "b", "c", "a"]
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    (line,) = [line for line in lines if line["event"] == "replicas differ"]
    assert (line["other"], line["replica"], line["differ"]) == ("a", "b", "what they compute of one text")


def test_a_nonstreamed_answer_comes_from_one_replica() -> None:
    """Nothing is sent before the answer is complete, so another replica may give a different one."""

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"whole", "more_body": True})
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b" answer", "more_body": False})

    def answering(status: int, body: bytes) -> Any:
        async def other(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": body, "more_body": False})

        return other

    for status, body in ((200, b"other answer"), (200, b"who"), (500, b"whole answer"), (200, b"whole answer")):
        for after in range(2):
            replicas = Fakes([("die", after)], names=("a", "b"), apps={"a": slow, "b": answering(status, body)})
            got = ask(replicas)
            assert (got.status, got.body, got.is_whole) == (status, body, True)


def test_a_stream_continues_only_as_a_stream() -> None:
    replicas = Fakes([("die", 3)], names=("a", "b"), apps={"b": whole})
    got = ask(replicas)
    assert got.status == 200
    assert STREAM.startswith(without_comments(got.body).split(b'data: {"error"')[0])
    assert b"the response has the status 201; before, it was a stream" in got.body


def test_attempts_are_limited_and_a_deadly_request_is_refused() -> None:
    got = ask(Fakes([("break off", 0)] * 9), attempts=3)
    assert got.status == 503
    assert b"3 replicas were lost" in got.body
    replicas = Fakes([("die", 0)] * 9)
    got = ask(replicas, attempts=3)
    assert b"two replicas died while serving this request" in got.body
    assert len(replicas.calls) == 2
    got = ask(Fakes([("die", 0)]), retry_burst=0)
    assert b"too many requests are being retried" in got.body


def test_a_failed_stream_ends_with_an_error_event() -> None:
    got = ask(Fakes([("die", 3), ("die", 3)]))
    assert got.status == 200
    assert without_comments(got.body).startswith(EVENTS[0])
    assert b'data: {"error":{' in got.body
    assert got.is_whole


def test_a_disconnected_client_ends_its_call() -> None:
    left = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    async def run() -> None:
        replicas = Fakes([])
        replicas.app = endless
        messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"body", "more_body": False}]

        async def receive() -> Any:
            await asyncio.sleep(0.05)
            return messages.pop()

        ingress = Ingress(replicas, RetryOptions())
        await asyncio.wait_for(ingress(SCOPE, receive, Got().send), 10)
        await asyncio.wait_for(left.wait(), 60)
        assert ingress.gate.in_flight == 0

    asyncio.run(run())


def test_a_repeated_request_has_the_same_response_key() -> None:
    replicas = Fakes([])
    replicas.app = whole
    ingress = Ingress(replicas, RetryOptions())

    def keys(**headers: str) -> str:
        assert ask_at(ingress, **headers).status == 201
        return replicas.calls[-1][1].response_key

    first = keys(idempotency_key="k")
    assert keys(idempotency_key="k") == first
    assert keys() != first
    assert keys(idempotency_key="other") != first
    assert keys(idempotency_key="k", authorization="somebody else") != first
    got = ask_at(ingress, b"another", idempotency_key="k")
    assert (got.status, b"idempotency_key_reused" in got.body) == (422, True)


def test_response_keys_of_repeats_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("onward.server.submission.time", SimpleNamespace(monotonic=lambda: now[0]))
    replicas = Fakes([])
    replicas.app = whole
    ingress = Ingress(replicas, RetryOptions(), Settings(idempotency_seconds=10.0))
    keys = []
    for now[0], body in ((0.0, b"a"), (9.9, b"a"), (10.0, b"b")):
        assert ask_at(ingress, body, idempotency_key="k").status == 201
        keys.append(replicas.calls[-1][1].response_key)
    assert keys[0] == keys[1] != keys[2]


def test_a_resumed_stream_has_its_original_response_key() -> None:
    replicas = Fakes([])
    replicas.app = whole
    ask_at(Ingress(replicas, RetryOptions()), last_event_id=f"{'0a' * 16}.11111111.22222222.3")
    assert replicas.calls[-1][1].response_key == "0a" * 16


def test_idempotency_keys_are_checked_as_by_a_server() -> None:
    for key in ("", "k" * 256, "two words"):
        got = ask_at(Ingress(Fakes([]), RetryOptions()), idempotency_key=key)
        assert (got.status, b"invalid_idempotency_key" in got.body) == (400, True)


def test_a_body_that_does_not_arrive() -> None:
    async def run() -> Got:
        got = Got()

        async def receive() -> Any:
            return await asyncio.Event().wait()

        await asyncio.wait_for(
            Ingress(Fakes([]), RetryOptions(), Settings(body_seconds=0.01))(SCOPE, receive, got.send), 10
        )
        return got

    got = asyncio.run(run())
    assert (got.status, b"request_timeout" in got.body) == (408, True)


def test_a_body_that_is_too_large() -> None:
    got = ask_at(Ingress(Fakes([]), RetryOptions(), Settings(max_body=3)))
    assert (got.status, b"body_too_large" in got.body) == (413, True)


@pytest.mark.parametrize(
    "path", ["/v1/files", "/files", "/v1/files/file-1/content", "/v1/batches", "/batches/b/cancel"]
)
def test_files_and_batches_are_refused_with_advice(path: str) -> None:
    got = ask_at(Ingress(Fakes([]), RetryOptions()), path=path)
    assert (got.status, b"onward batch --replicas" in got.body) == (404, True)


@pytest.mark.parametrize(("seconds", "whole_answer"), [(20.0, True), (0.0, False)])
def test_a_draining_ingress_finishes_requests_and_accepts_none(seconds: float, whole_answer: bool) -> None:
    replicas = Fakes([] if whole_answer else [("hang", 3)])
    ingress, first, second, ready = Ingress(replicas, RetryOptions(silence=30.0)), Got(), Got(), Got()

    def receiver() -> Any:
        bodies = [{"type": "http.request", "body": b"body", "more_body": False}]

        async def receive() -> Any:
            return bodies.pop() if bodies else await asyncio.Event().wait()

        return receive

    async def run() -> None:
        running = asyncio.ensure_future(ingress(SCOPE, receiver(), first.send))
        while first.body.count(b"data") < 2:
            await asyncio.sleep(0.001)
        draining = asyncio.ensure_future(ingress.drain(seconds))
        await asyncio.sleep(0)
        await ingress(SCOPE, receiver(), second.send)
        await ingress({**SCOPE, "method": "GET", "path": "/ready"}, receiver(), ready.send)
        await asyncio.wait_for(asyncio.gather(running, draining), 60)

    asyncio.run(run())
    assert (second.status, ready.status) == (503, 503)
    assert b"is shutting down" in second.body
    assert first.is_whole
    if whole_answer:
        assert without_comments(first.body) == STREAM
    else:
        assert without_comments(first.body).startswith(EVENTS[0] + EVENTS[1])
        assert b"shut down before the response was complete" in first.body
