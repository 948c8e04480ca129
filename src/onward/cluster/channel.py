"""One channel from each replica to its ingress, for all streams.

In the replica, the ASGI application is called within the process, and a `ReplyQueue` collects what it sends.
"""

import asyncio
import contextlib
import contextvars
import itertools
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

from onward.cluster.call import LOG_FIELDS, ProxiedRequest, ReplicaLostError, Reply, ReplyBatch, RouteAttempt

# Seconds between a replica's heartbeats.
HEARTBEAT = 0.5
# Seconds for which messages are collected into a batch: sending one costs as much as many tokens of a small model.
FLUSH_INTERVAL = 0.02
# Messages in a batch, beyond which applications wait until it is sent, so that their messages are joined.
_MAX_QUEUED = 64
# Seconds that an application gets to finish once its client has disconnected, and its last messages to arrive.
_CANCEL_GRACE = 5.0
# An ingress renews its lease on a queue this often, and is lost when the lease expires: Ray doesn't tell a replica that
# a caller has died.
RENEW_INTERVAL, _LEASE = 5.0, 25.0
# Seconds after which a channel without streams is closed.
_IDLE_TIMEOUT = 5.0

App = Callable[[Any, Any, Any], Awaitable[None]]
Replies = asyncio.Queue[Reply | BaseException]  # to one call


class ReplyQueue:
    """The messages of all responses for one ingress, collected into batches. A response's status, its first part and
    its end are not delayed. replica: its name. fingerprint: of its engine. gather: seconds between two other batches.
    """

    def __init__(
        self, replica: str, fingerprint: str, gather: float = FLUSH_INTERVAL, heartbeat: float = HEARTBEAT
    ) -> None:
        self._replica, self._fingerprint = replica, fingerprint
        self._gather, self._heartbeat = gather, heartbeat
        self._messages: dict[int, list[Mapping[str, Any]]] = {}
        self._started: set[int] = set()  # responses whose first part was queued
        self._ended: set[int] = set()
        self._count = 0
        self._changed, self._urgent, self._flushed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._closed = asyncio.Event()
        self.renew()

    @property
    def is_closed(self) -> bool:
        """Whether messages are dropped."""
        return self._closed.is_set()

    def renew(self) -> None:
        """Extend the lease of the ingress."""
        self._renewed = time.monotonic()

    async def wait_closed(self) -> None:
        """Wait until the channel has ended, or the ingress is lost."""
        while not self.is_closed:
            await _until(self._closed, self._renewed + _LEASE)
            self._close_if_expired()

    def _close_if_expired(self) -> None:
        if time.monotonic() - self._renewed >= _LEASE:
            self.close()

    def close(self) -> None:
        """Drop all messages, and let no application wait."""
        self._closed.set()
        self._take()

    async def put(self, number: int, message: Mapping[str, Any]) -> None:
        """Queue a message of a response. Waits while the queue is full."""
        if self.is_closed:
            return
        self._messages.setdefault(number, []).append(message)
        self._count += 1
        is_body = message["type"] == "http.response.body"
        is_last = is_body and not message.get("more_body", False)
        if is_last or number not in self._started:
            self._urgent.set()
        if is_last:
            self._ended.add(number)
            self._started.discard(number)
        elif is_body:
            self._started.add(number)
        self._changed.set()
        if self._count >= _MAX_QUEUED:
            await self._flushed.wait()

    def forget(self, number: int) -> None:
        """A response has no more messages, whether or not it was complete."""
        self._started.discard(number)

    async def batches(self) -> AsyncGenerator[ReplyBatch, None]:
        """The batches, with heartbeats. Closing the generator closes the queue."""
        beat = -math.inf  # time of the last heartbeat
        due = 0.0  # time of the next batch that isn't urgent
        try:
            while not self.is_closed:
                await _until(self._changed, beat + self._heartbeat)
                await _until(self._urgent, due)
                now = time.monotonic()
                due = now + self._gather
                is_beat = now - beat >= self._heartbeat
                beat = now if is_beat else beat
                yield ReplyBatch(self._replica, self._fingerprint, self._take(), is_beat)
                self._close_if_expired()
        finally:
            self.close()

    def _take(self) -> tuple[Reply, ...]:
        replies = tuple(
            Reply(self._replica, self._fingerprint, tuple(_joined(messages)), number in self._ended, number)
            for number, messages in self._messages.items()
        )
        self._messages, self._count = {}, 0
        self._ended.clear()
        self._changed.clear()
        self._urgent.clear()
        flushed, self._flushed = self._flushed, asyncio.Event()
        flushed.set()
        return replies


async def _until(event: asyncio.Event, end: float) -> None:
    """Wait for an event, at most until the time `end`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, end - time.monotonic())):
            await event.wait()


def _joined(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages of a response, with its bodies joined into one."""
    bodies = [message for message in messages if message["type"] == "http.response.body"]
    if len(bodies) < 2:
        return messages
    joined = {**bodies[-1], "body": b"".join([message.get("body", b"") for message in bodies])}
    if reports := [message["onward"] for message in bodies if message.get("onward")]:
        sequences = zip(*(report["emitted"] for report in reports), strict=True)
        emitted = [list(itertools.chain.from_iterable(ids)) for ids in sequences]
        joined["onward"] = {"emitted": emitted, "ended": [at for report in reports for at in report["ended"]]}
    return [*(message for message in messages if message["type"] != "http.response.body"), joined]


async def serve_into(
    app: App,
    call: ProxiedRequest,
    number: int,
    queue: ReplyQueue,
    replica: str = "",
    process: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Serve a call, and queue the messages of its response. To the application, cancellation and a closed queue are a
    client that disconnects. The last message of the response has the entry `LOG_FIELDS`. replica: its id, for the
    header x-onward-replica. process: log fields that say where it runs, which clients don't see."""
    disconnected, scope = asyncio.Event(), _scope(call)
    last: list[Any] = []
    requests = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Any:
        if requests:
            return requests.pop()
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if replica and message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"x-onward-replica", replica.encode())]}
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            last.append(message)  # until the application has ended, and the log fields are complete
        else:
            await queue.put(number, message)

    running, closed = asyncio.ensure_future(app(scope, receive, send)), asyncio.ensure_future(queue.wait_closed())
    try:
        await asyncio.wait([running, closed], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        if last:
            access = scope.get("onward.access")
            fields = {} if access is None else access.fields
            await queue.put(number, {**last[0], LOG_FIELDS: {**fields, **process}})
        closed.cancel()
        disconnected.set()
        if not running.done():
            await asyncio.wait([running], timeout=_CANCEL_GRACE)
            running.cancel()
        queue.forget(number)


def _scope(call: ProxiedRequest) -> dict[str, Any]:
    resume: dict[str, Any] = {"answer": call.response_key, "emitted": call.emitted, "ended": call.ended}
    if last := call.named_headers.get("last-event-id"):
        resume["last_event_id"] = last
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": list(call.headers),
        "client": None,
        "server": None,
        "state": {},
        "onward": resume,
        "onward.client": call.client,
    }


class ReplicaTransport(Protocol):
    """How replicas are reached."""

    @property
    def names(self) -> frozenset[str]:
        """The replicas that take requests now."""

    def call(
        self, call: ProxiedRequest, route: RouteAttempt, ingress: str, number: int
    ) -> tuple[Awaitable[None], Callable[[], None]]:
        """Have a replica serve a call (`serve_into`). Returns an awaitable that ends with the call, and a function that
        cancels it. Calls `route.assign` with the replica, in any thread."""

    def batches(self, replica: str, ingress: str) -> AsyncGenerator[ReplyBatch, None]:
        """The batches of a replica for an ingress (`ReplyQueue.batches`)."""


class ChannelReplicaSet:
    """Replicas whose replies come through channels; the calls themselves only report their end. A response arrives
    complete and in order, or the call is lost: a channel that ended is never reopened, since later calls use channels
    with another name."""

    def __init__(self, remote: ReplicaTransport) -> None:
        self._remote = remote
        self._ingress = uuid.uuid4().hex  # the name of new channels
        self._numbers = itertools.count()
        self._channels: dict[tuple[str, str], dict[int, Replies]] = {}  # the streams of each
        self._reading: set[asyncio.Task[None]] = set()
        self._unassigned: set[int] = set()  # calls without a replica

    @property
    def names(self) -> frozenset[str]:
        """The replicas that take requests now."""
        return self._remote.names

    async def serve(self, call: ProxiedRequest, route: RouteAttempt) -> AsyncGenerator[Reply, None]:
        """Have a replica serve a call, and assign it to `route`. Closing the generator cancels the call. Raises
        `ReplicaLostError`: the replica is gone."""
        loop, number, ingress = asyncio.get_running_loop(), next(self._numbers), self._ingress
        replies: Replies = asyncio.Queue()
        streams: dict[int, Replies] = {}  # of the replica's channel
        is_closed = False

        def assign(replica: str) -> None:
            nonlocal streams
            route.assign(replica)
            if is_closed:
                return
            streams.pop(number, None)  # the previous replica did not take the call
            streams = self._streams(replica, ingress)
            streams[number] = replies
            self._unassigned.discard(number)

        def note_end(ended: asyncio.Future[None]) -> None:  # replies may still be on their way
            if ended.cancelled():
                return
            if error := ended.exception():
                replies.put_nowait(error)
            elif not is_closed:
                lost = ReplicaLostError("the replica's response broke off", died=False)
                loop.call_later(_CANCEL_GRACE, replies.put_nowait, lost)

        sent = replace(route, on_assign=lambda replica: loop.call_soon_threadsafe(assign, replica))
        self._unassigned.add(number)
        ended, cancel = self._remote.call(call, sent, ingress, number)
        ending = asyncio.ensure_future(ended)  # held here: the loop doesn't keep tasks alive
        ending.add_done_callback(note_end)
        is_complete = False
        try:
            while not is_complete:
                reply = await replies.get()
                if isinstance(reply, BaseException):
                    raise reply
                is_complete = reply.is_last
                yield reply
        finally:
            is_closed = True
            self._unassigned.discard(number)
            streams.pop(number, None)
            if not is_complete:
                cancel()

    def _streams(self, replica: str, ingress: str) -> dict[int, Replies]:
        """The streams of a replica's channel, which is opened if necessary."""
        if (replica, ingress) not in self._channels:
            self._channels[replica, ingress] = {}
            # In its own context: Ray ends what a request called in its context with that request; this serves others.
            reading = self._read(replica, ingress)
            task = asyncio.get_running_loop().create_task(reading, context=contextvars.Context())
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)
        return self._channels[replica, ingress]

    async def _read(self, replica: str, ingress: str) -> None:
        """Distribute the batches of a channel to its streams. Without streams it is closed after a while, but at once
        if the replica leaves, which waits for that."""
        batches, streams = self._remote.batches(replica, ingress), self._channels[replica, ingress]
        used = time.monotonic()
        lost: Exception = ReplicaLostError("the connection to the replica was lost", died=False)
        try:
            async for batch in batches:
                for reply in batch.items:
                    if (queue := streams.get(reply.number)) is not None:
                        queue.put_nowait(reply)
                if batch.is_beat:
                    for number in streams.keys() - {reply.number for reply in batch.items}:
                        streams[number].put_nowait(Reply(batch.replica, batch.fingerprint))
                now = time.monotonic()
                used = now if streams else used
                if not streams and not (replica in self.names and (now - used < _IDLE_TIMEOUT or self._unassigned)):
                    break
        except Exception as error:
            lost = error
        finally:
            del self._channels[replica, ingress]
            if self._ingress == ingress:
                self._ingress = uuid.uuid4().hex
            for queue in streams.values():
                queue.put_nowait(lost)
            await batches.aclose()
