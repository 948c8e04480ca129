"""Many answers through one channel per replica: complete and in order, or their calls are lost."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest

from onward.cluster import channel as bridge
from onward.cluster import channel as channels
from onward.cluster.call import ProxiedRequest, ReplicaLostError, ReplyBatch, RouteAttempt
from onward.cluster.channel import ChannelReplicaSet, ReplyQueue, serve_into
from onward.cluster.ingress import Ingress, RetryOptions

EVENTS = 40
CALL = ProxiedRequest("POST", "/", b"", (), b"", "0" * 32)


def stream_of(name: str) -> bytes:
    return b"".join(f"data: {name} {at}\n\n".encode() for at in range(EVENTS))


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    """Events with the body's name, after the last one that was sent."""
    name = (await receive())["body"].decode()
    begun = scope["onward"]
    (known,) = begun["emitted"] or [()]
    first = len(known)
    assert list(known) == list(range(first))
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for at in range(first, EVENTS):
        progress = {"emitted": [[at]], "ended": []}
        body = f"data: {name} {at}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True, "onward": progress})
        if at % 3 == 0:
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Fakes:
    """Replicas of this process. breaks: after how many batches the channels that are opened end, in turn."""

    def __init__(self, app: Any = streaming, breaks: tuple[int, ...] = (), names: tuple[str, ...] = ("a", "b")) -> None:
        self.app, self.breaks, self.names = app, list(breaks), frozenset(names)
        self.opened: list[tuple[str, str]] = []
        self._queues: dict[tuple[str, str], ReplyQueue] = {}
        self._turn = 0

    def _queue(self, replica: str, ingress: str) -> ReplyQueue:
        return self._queues.setdefault((replica, ingress), ReplyQueue(replica, "same", gather=0.001, heartbeat=0.05))

    def call(
        self, call: ProxiedRequest, route: RouteAttempt, ingress: str, number: int
    ) -> tuple[Awaitable[None], Callable[[], None]]:
        self._turn += 1
        choices = sorted(self.names - route.avoid) or sorted(self.names)
        replica = choices[self._turn % len(choices)]
        route.assign(replica)
        serving = asyncio.ensure_future(serve_into(self.app, call, number, self._queue(replica, ingress)))

        def end() -> None:
            serving.cancel()

        return serving, end

    async def batches(self, replica: str, ingress: str) -> AsyncGenerator[ReplyBatch, None]:
        self.opened.append((replica, ingress))
        left = self.breaks.pop(0) if self.breaks else -1
        batches = self._queue(replica, ingress).batches()
        try:
            async for batch in batches:
                if not left:
                    raise ReplicaLostError("it broke", died=False)
                left -= 1
                yield batch
        finally:
            await batches.aclose()
            del self._queues[replica, ingress]


async def asked(ingress: Ingress, name: str) -> bytes:
    bodies = [{"type": "http.request", "body": name.encode(), "more_body": False}]
    got: list[bytes] = []

    async def receive() -> Any:
        return bodies.pop() if bodies else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        got.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    await asyncio.wait_for(ingress(scope, receive, send), 60)
    return b"".join(got)


def all_asked(fakes: Fakes, names: list[str]) -> list[bytes]:
    async def run() -> list[bytes]:
        ingress = Ingress(ChannelReplicaSet(fakes), RetryOptions(silence=1.0, quarantine=0.0))
        return await asyncio.gather(*(asked(ingress, name) for name in names))

    return asyncio.run(run())


NAMES = [f"stream {at}" for at in range(20)]


def test_streams_share_a_channel() -> None:
    fakes = Fakes()
    assert all_asked(fakes, NAMES) == [stream_of(name) for name in NAMES]
    assert sorted(replica for replica, _ in fakes.opened) == ["a", "b"]


@pytest.mark.parametrize("after", range(0, 24, 3))
def test_a_broken_channel_loses_no_message(after: int) -> None:
    fakes = Fakes(breaks=(after,), names=("a", "b", "c"))
    assert all_asked(fakes, NAMES) == [stream_of(name) for name in NAMES]


def test_a_channel_outlives_the_request_that_opened_it() -> None:
    """Ray ends with a request all calls that were made in its context."""
    requested = ContextVar("requested", default="")
    fakes = Fakes(names=("a",))

    class Noting(Fakes):
        async def batches(self, replica: str, ingress: str) -> AsyncGenerator[ReplyBatch, None]:
            assert requested.get() == ""
            async for batch in fakes.batches(replica, ingress):
                yield batch

        def call(self, *call: Any) -> tuple[Awaitable[None], Callable[[], None]]:
            assert requested.get() == "by somebody"
            return fakes.call(*call)

    async def run() -> None:
        requested.set("by somebody")
        assert await asked(Ingress(ChannelReplicaSet(Noting()), RetryOptions()), "x") == stream_of("x")

    asyncio.run(run())


def test_failures_are_reported_at_once() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a defect")

    async def run() -> None:
        replicas = ChannelReplicaSet(Fakes(failing))
        with pytest.raises(ValueError, match="a defect"):
            assert not [item async for item in replicas.serve(CALL, RouteAttempt())]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_unfinished_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_CANCEL_GRACE", 0.1)

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def run() -> None:
        replicas = ChannelReplicaSet(Fakes(endless))
        with pytest.raises(ReplicaLostError, match="broke off"):
            assert not [item async for item in replicas.serve(CALL, RouteAttempt())]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_idle_channel_is_closed_and_the_next_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_IDLE_TIMEOUT", 0.0)
    fakes = Fakes(names=("a",))

    async def run() -> None:
        ingress = Ingress(ChannelReplicaSet(fakes), RetryOptions())
        for _ in range(2):
            assert await asked(ingress, "x") == stream_of("x")
            await asyncio.sleep(0.3)

    asyncio.run(run())
    assert len(fakes.opened) == len(set(fakes.opened)) == 2


def test_starts_and_ends_are_sent_without_batching() -> None:
    async def run() -> None:
        queue = ReplyQueue("a", "same", gather=3600.0, heartbeat=3600.0)
        batches = queue.batches()
        assert (await anext(batches)).is_beat

        async def say(number: int, *bodies: bytes, last: bool = False) -> None:
            for body in bodies:
                await queue.put(number, {"type": "http.response.body", "body": body, "more_body": not last})

        async def got() -> list[tuple[int, bytes]]:
            batch = await asyncio.wait_for(anext(batches), 60)
            return [(item.number, item.messages[-1].get("body", b"")) for item in batch.items]

        await queue.put(1, {"type": "http.response.start", "status": 200, "headers": []})
        assert await got() == [(1, b"")]
        await say(1, b"a")
        assert await got() == [(1, b"a")]
        await say(1, b"b", b"c")
        await say(2, b"x")
        assert await got() == [(1, b"bc"), (2, b"x")], "who waits goes along with who does not"
        await say(1, b"d")
        await say(2, b"y")
        await say(2, b"z", last=True)
        assert await got() == [(1, b"d"), (2, b"yz")]
        await say(1, b"e")
        coming = asyncio.ensure_future(anext(batches))
        assert not (await asyncio.wait([coming], timeout=0.05))[0]
        await say(1, b"", last=True)
        assert [item.is_last for item in (await asyncio.wait_for(coming, 20)).items] == [True]
        await batches.aclose()

    asyncio.run(run())


def test_a_closed_outbox_drops_messages() -> None:
    async def run() -> None:
        queue = ReplyQueue("a", "same")
        batches = queue.batches()
        await anext(batches)
        await batches.aclose()
        for _ in range(200):
            await queue.put(1, {"type": "http.response.body", "body": b"a", "more_body": True})
        assert not queue._messages

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("is_opened", [True, False])
def test_a_call_ends_with_its_ingress(is_opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray doesn't notify a replica of a caller's death: the replica ends unread streams without waiting."""
    monkeypatch.setattr(bridge, "_LEASE", 0.3)
    left = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()

        async def speak() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"a", "more_body": True})
                await asyncio.sleep(0)

        speaking = asyncio.ensure_future(speak())
        assert (await receive())["type"] == "http.disconnect"
        speaking.cancel()
        left.set()

    async def run() -> None:
        queue = ReplyQueue("a", "same", heartbeat=0.05)
        batches = queue.batches()
        serving = asyncio.ensure_future(serve_into(endless, CALL, 1, queue))
        for _ in range(6):  # as long as the ingress says that it listens
            await asyncio.sleep(0.1)
            queue.renew()
            if is_opened:
                await anext(batches)
        assert not serving.done()
        if is_opened:
            assert [batch async for batch in batches]
        await asyncio.wait_for(serving, 5)
        assert left.is_set()
        assert queue.is_closed

    asyncio.run(asyncio.wait_for(run(), 60))


def test_backpressure_blocks_the_application() -> None:
    sent = 0

    async def run() -> None:
        nonlocal sent
        queue = ReplyQueue("a", "same", gather=0.0)

        async def speak() -> None:
            nonlocal sent
            for at in range(1000):
                progress = {"emitted": [[at], []], "ended": [at] if at % 100 == 0 else []}
                body = b"%d " % at
                await queue.put(
                    7, {"type": "http.response.body", "body": body, "more_body": at < 999, "onward": progress}
                )
                sent += 1

        speaking = asyncio.ensure_future(speak())
        await asyncio.sleep(0.05)
        assert sent < bridge._MAX_QUEUED
        messages: list[Any] = []
        async for batch in queue.batches():
            for item in batch.items:
                assert item.number == 7
                messages += item.messages
            if batch.items and batch.items[0].is_last:
                break
        await speaking
        assert b"".join(message["body"] for message in messages) == b"".join(b"%d " % at for at in range(1000))
        assert [id for message in messages for id in message["onward"]["emitted"][0]] == list(range(1000))
        assert [at for message in messages for at in message["onward"]["ended"]] == list(range(0, 1000, 100))
        assert [message["more_body"] for message in messages] == [True] * (len(messages) - 1) + [False]
        assert len(messages) < 30

    asyncio.run(run())
