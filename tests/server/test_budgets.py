"""The memory of all requests is within one budget, and one client leaves room for the others."""

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import MESSAGES, SECONDS, LiveServer
from test_operations import LONG, leave, opened, until

import onward
from onward.protocols.choices import as_json
from onward.server.client import MemoryBudget, MemoryFullError, Reservation
from onward.server.errors import WholeResponse, rendered
from onward.server.submission import ReplayRecord

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHORT = {"messages": MESSAGES, "max_tokens": 2}
Start = Callable[..., LiveServer]


def head_of(length: int, path: str = TEXT) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return head.encode()


@contextlib.contextmanager
def connected(server: LiveServer, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as connection:
        connection.sendall(sent)
        yield connection


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_budget_counts_reservations() -> None:
    budget = MemoryBudget(1000)
    one, other, server = budget.reservation("a"), budget.reservation("b"), budget.reservation("")
    one.resize(500)
    with pytest.raises(MemoryFullError, match=r"all the memory allowed \(1 kB\)"):
        one.resize(501)
    other.resize(200)
    with pytest.raises(MemoryFullError):
        other.add_body(51)  # bodies take three quarters at most
    other.add_body(50)
    server.resize(250)
    with pytest.raises(MemoryFullError):
        other.resize(251)
    assert (one.nbytes, other.nbytes, budget.used) == (500, 250, 1000)
    one.resize(100)
    other.release()
    one.release()
    assert (budget.used, budget._by_client) == (250, {"": 250})


def test_unfinished_bodies_reserve_the_bytes_received(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, request_memory=2**20)
    memory = server.app.service.memory
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(connected(server, head_of(8_000_000)))
        until(lambda: server.app.gate.in_flight == 10)
        assert memory.used == 0, "nothing has arrived"
        first = stack.enter_context(connected(server, head_of(8_000_000) + b" " * 500_000))
        until(lambda: memory.used >= 500_000)
        second = stack.enter_context(connected(server, head_of(8_000_000) + b" " * 100_000))
        answer = b"".join(iter(lambda: second.recv(4096), b"")).decode()
        assert answer.startswith("HTTP/1.1 503 ")
        assert "retry-after: 5" in answer
        assert "connection: close" in answer
        assert '"code":"request_memory"' in answer
        assert server.post(CHAT, SHORT).status_code == 200
        assert memory.used <= 2**19, "half of it, for one client"
        first.close()
        until(lambda: memory.used < 100_000)
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 1, "user": "u" * 400_000}).status_code == 200
    server.wait_idle()
    assert memory.used == 0


def test_answers_are_counted_and_end_when_the_budget_is_exhausted(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, request_memory=2**20, keep_alive=0.05)
    body = {**LONG, "logprobs": 5, "n": 2}
    assert server.post(TEXT, {**body, "max_tokens": 20}).status_code == 200
    stream = server.stream(TEXT, body)
    error = json.loads(stream.events[-1])["error"]
    assert (error["code"], error["type"]) == ("request_memory", "server_error")
    assert server.post(TEXT, body).status_code == 503
    server.wait_idle()
    assert server.app.service.memory.used <= 2**15, "what is left is of the stream, to be resumed"
    assert server.post(CHAT, SHORT).status_code == 200


def test_records_only_store_ids(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm})
    body = {"prompt": ["Once", "The fox"], "max_tokens": 50, "logprobs": 5, "n": 2, "temperature": 1}
    first = server.post(TEXT, body, headers={"idempotency-key": "a"})
    server.wait_idle()
    (stored,) = server.app.service.replays._records.values()
    assert stored.request is None
    assert stored.emitted is not None
    assert all(type(ids) is array and ids.itemsize == 4 for ids in stored.emitted)
    assert stored.nbytes == 1024 + 4 * sum(map(len, stored.emitted)) == server.app.service.memory.used
    server.post(TEXT, {"prompt": "x", "max_tokens": 1})  # the engine refers to its last request
    server.wait_idle()
    gc.collect()
    assert sum(type(each) is onward.Piece for each in gc.get_objects()) < 50, "of 200"
    assert server.post(TEXT, body, headers={"idempotency-key": "a"}).content == first.content
    server.wait_idle()
    assert server.app.service.metrics.of("demo").ended.total() == 3, "a repetition is not counted again"


def test_records_are_evicted_at_their_share(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, request_memory=2**17)  # 4 kB for records
    for number in range(6):
        server.post(TEXT, {"prompt": "x", "max_tokens": 3}, headers={"idempotency-key": str(number)})
        server.wait_idle()
    assert len(server.app.service.replays) == 3
    assert 0 < server.app.service.memory.used <= 4096
    assert isinstance(server.app.service.replays._records.popitem()[1], ReplayRecord)


# ── threads ─────────────────────────────────────────────────────────────────────────────────────────────────


class BlockedReader:
    """Bodies whose model has this name are read when they are released."""

    def __init__(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.end, self.read = threading.Semaphore(0), threading.Event(), 0
        models, find = server.app.service.models, server.app.service.models.find

        def blocked(name: object, *check: Any) -> Any:
            if name == "blocked":
                self.started.release()
                assert self.end.wait(SECONDS)
                self.read += 1
                name = "demo"
            return find(name, *check)

        monkeypatch.setattr(models, "find", blocked)


@pytest.fixture
def blocked_reader(
    start: Start, lm: onward.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LiveServer, BlockedReader]]:
    server = start({"demo": lm})
    blocked = BlockedReader(server, monkeypatch)
    yield server, blocked
    blocked.end.set()
    server.wait_idle()


def test_the_queue_of_a_disconnected_client_is_dropped(blocked_reader: tuple[LiveServer, BlockedReader]) -> None:
    server, blocked = blocked_reader
    body = json.dumps({"prompt": "x", "model": "blocked", "max_tokens": 1}).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(connected(server, head_of(len(body)) + body))
        for _ in range(2):
            assert blocked.started.acquire(timeout=SECONDS)
        until(lambda: len(server.app.service._readers) == 8)
        assert server.get("/metrics").status_code == server.get("/stats").status_code == 200, "a thread of their own"
    until(lambda: len(server.app.service._readers) == 0)
    until(lambda: server.app.gate.in_flight == 0)
    blocked.end.set()
    server.wait_idle()
    until(lambda: blocked.read == 2)
    assert server.engines["demo"].stats().steps == 0


def test_large_bodies_are_read_one_at_a_time(blocked_reader: tuple[LiveServer, BlockedReader]) -> None:
    server, blocked = blocked_reader
    body = json.dumps({"prompt": "x", "model": "blocked", "max_tokens": 1, "user": "u" * 300_000}).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(server, head_of(len(body)) + body))
        assert blocked.started.acquire(timeout=SECONDS)
        until(lambda: len(server.app.service._large) == 2)
        assert server.post(CHAT, SHORT).status_code == 200
        assert server.app.service._large.running == 1


def test_clients_are_distinguished_by_key_or_address(start: Start, lm: onward.LanguageModel) -> None:
    seen: list[str] = []

    def noting(server: LiveServer) -> None:
        reservation = server.app.service.memory.reservation

        def noted(client: str) -> Reservation:
            seen.append(client)
            return reservation(client)

        server.app.service.memory.reservation = noted  # type: ignore[method-assign]

    noting(open_server := start({"demo": lm}))
    open_server.get("/health", headers={"authorization": "Bearer x"})
    assert seen == ["127.0.0.1"]
    noting(server := start({"demo": lm}, api_keys=("one", "two")))
    for key in ("one", "two", "one"):
        server.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert seen[1] == seen[3] != seen[2]
    assert "one" not in "".join(seen)


def test_slow_grammars_block_no_other_client(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm})
    with contextlib.ExitStack() as stack:
        for at in range(6):
            numbers = (101, 103, 107, 109 + 2 * at)
            schema = {"allOf": [{"type": "integer", "multipleOf": number} for number in numbers]}
            body = json.dumps({"prompt": "x", "max_tokens": 1, "json_schema": schema}).encode()
            stack.enter_context(connected(server, head_of(len(body)) + body))
        until(lambda: len(_trials()) == 6)
        assert server.post(CHAT, SHORT).status_code == 200
        assert len(_trials()) == 6
    until(lambda: not _trials())
    server.wait_idle()


def _trials() -> Any:
    return onward.constraints.compiler._cache._trials


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(value=values)
def test_an_answer_is_the_same_json_in_parts(value: Any) -> None:
    assert rendered(value) == as_json(value).encode("utf-8", "backslashreplace")


def test_an_unread_answer_is_abandoned() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            await asyncio.Event().wait()  # the client reads no more

    content = bytes(range(256)) * 1000
    asyncio.run(WholeResponse(content, 0.01)({}, AsyncMock(), send))
    assert [len(message.get("body", b"")) for message in sent] == [0, 65536, 65536]
    assert [message.get("more_body") for message in sent] == [None, True, True]
    whole: list[Any] = []

    async def reads(message: Any) -> None:
        whole.append(message)

    asyncio.run(WholeResponse(content, 60)({}, AsyncMock(), reads))
    assert b"".join(message["body"] for message in whole[1:]) == content
    assert not whole[-1]["more_body"]


# ── connections ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 129 + b"\r\n",
        b"GET /" + b"h" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\na: " + b"b" * 70_000,
        b"POST /v1/completions HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\ncontent-length: 5\r\n\r\nhello",
    ],
    ids=["long header", "many headers", "long line", "unfinished", "with a body"],
)
def test_the_head_of_a_request_is_limited(server: LiveServer, head: bytes) -> None:
    with connected(server, head) as connection:
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"code":"headers_too_large"' in answer
        assert connection.recv(4096) == b""
    with connected(server, b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"b" * 60_000 + b"\r\n\r\n") as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_head_must_arrive_in_time(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.server.lifecycle.HEAD_SECONDS", 0.3)
    for begin in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\na: b\r\n"):
        with connected(server, begin) as connection:
            began = time.monotonic()
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 "), begin
            assert connection.recv(4096) == b""
            assert time.monotonic() - began < SECONDS
    with connected(server) as connection:  # as does that of a second request
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while b"version" not in answer:
            answer += connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200 ")
        for _ in range(5):  # which is less than the time
            connection.sendall(b"\r\n")
            time.sleep(0.01)
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_connections_without_a_request_are_closed_for_new_ones(
    start: Start, lm: onward.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start({"demo": lm})
    monkeypatch.setattr(server.uvicorn.config.http_protocol_class, "max_connections", 3)
    running = opened(server, TEXT, LONG)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connected(server, b"GET /"))
        assert server.get("/health").status_code == 200
        until(lambda: len(server.uvicorn.server_state.connections) <= 3)
    assert running.readline().startswith(b"id: "), "the one with a request stays"
    leave(running)
    monkeypatch.setattr(server.uvicorn.config.http_protocol_class, "max_connections", 1)
    running = opened(server, TEXT, LONG)
    with connected(server) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 503 ")
    leave(running)
    server.wait_idle()
