"""One channel from each replica to its ingress, whatever the number of streams.

In the replica, the ASGI application is called within the process, and a `ReplyQueue` collects what its responses send.
"""

import asyncio
import contextlib
import contextvars
import itertools
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from onward.cluster.call import FACTS, ProxiedRequest, ReplicaLostError, Reply, ReplyBatch, RouteAttempt

# How often a replica says that it is well.
HEARTBEAT = 0.5
# Seconds in which what comes is gathered into one parcel, for a parcel costs as much as many tokens of a small model.
GATHER = 0.02
# Messages in a parcel, beyond which applications wait for it to be sent: what they say then comes together.
_MOST = 64
# Seconds that the application gets for its last words when nobody listens any more.
_LAST_WORDS = 5.0
# An ingress says so often that it listens, and counts as lost after so many seconds without that: Ray does not tell a
# replica that a caller has died.
LISTENING, _PATIENCE = 5.0, 25.0

App = Callable[[Any, Any, Any], Awaitable[None]]


class ReplyQueue:
    """What answers bring for one ingress, gathered into parcels. An answer's status, its first words and its end do not
    wait to be gathered.

    replica: its name. fingerprint: what the bits of its texts depend on. gather: seconds between two other parcels.
    """

    def __init__(self, replica: str, fingerprint: str, gather: float = GATHER, heartbeat: float = HEARTBEAT) -> None:
        self._replica, self._fingerprint = replica, fingerprint
        self._gather, self._heartbeat = gather, heartbeat
        self._parts: dict[int, list[Mapping[str, Any]]] = {}
        self._speaking: set[int] = set()  # answers that have said their first words
        self._ended: set[int] = set()
        self._count = 0
        self._changed, self._urgent, self._taken = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._closed = asyncio.Event()
        self.hear()

    @property
    def is_closed(self) -> bool:
        """Whether nobody gets what is put into it."""
        return self._closed.is_set()

    def hear(self) -> None:
        """The ingress has said that it listens, or will."""
        self._heard = time.monotonic()

    async def closed(self) -> None:
        """Wait until nobody gets what is put into it: its channel has ended, or the ingress is lost."""
        while not self.is_closed:
            await _until(self._closed, self._heard + _PATIENCE)
            self._close_if_lost()

    def _close_if_lost(self) -> None:
        if time.monotonic() - self._heard >= _PATIENCE:
            self.close()

    def close(self) -> None:
        """Keep nothing, and let nobody wait."""
        self._closed.set()
        self._take()

    async def put(self, number: int, message: Mapping[str, Any]) -> None:
        """Say a message of an answer. Waits while there are many to be sent."""
        if self.is_closed:
            return
        self._parts.setdefault(number, []).append(message)
        self._count += 1
        is_body = message["type"] == "http.response.body"
        is_last = is_body and not message.get("more_body", False)
        if is_last or number not in self._speaking:
            self._urgent.set()
        if is_last:
            self._ended.add(number)
            self._speaking.discard(number)
        elif is_body:
            self._speaking.add(number)
        self._changed.set()
        if self._count >= _MOST:
            await self._taken.wait()

    def forget(self, number: int) -> None:
        """An answer says no more, whether or not it has said its end."""
        self._speaking.discard(number)

    async def parcels(self) -> AsyncGenerator[ReplyBatch, None]:
        """What comes, with a heartbeat at least every so often. Closing it closes the outbox: nothing is kept then."""
        beat = -math.inf  # the last heartbeat
        due = 0.0  # when the next parcel is sent that nobody waits for
        try:
            while not self.is_closed:
                await _until(self._changed, beat + self._heartbeat)
                await _until(self._urgent, due)
                now = time.monotonic()
                due = now + self._gather
                is_beat = now - beat >= self._heartbeat
                beat = now if is_beat else beat
                yield ReplyBatch(self._replica, self._fingerprint, self._take(), is_beat)
                self._close_if_lost()
        finally:
            self.close()

    def _take(self) -> tuple[Reply, ...]:
        items = tuple(
            Reply(self._replica, self._fingerprint, tuple(_joined(messages)), number in self._ended, number)
            for number, messages in self._parts.items()
        )
        self._parts, self._count = {}, 0
        self._ended.clear()
        self._changed.clear()
        self._urgent.clear()
        taken, self._taken = self._taken, asyncio.Event()
        taken.set()
        return items


async def _until(event: asyncio.Event, end: float) -> None:
    """Wait for an event, or until the clock shows `end`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, end - time.monotonic())):
            await event.wait()


def _joined(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages of an answer, with bodies that follow each other as one."""
    bodies = [message for message in messages if message["type"] == "http.response.body"]
    if len(bodies) < 2:
        return messages
    joined = {**bodies[-1], "body": b"".join([message.get("body", b"") for message in bodies])}
    told = [message["onward"] for message in bodies if message.get("onward")]
    if told:
        emitted = [
            [id for ids in texts for id in ids] for texts in zip(*(each["emitted"] for each in told), strict=True)
        ]
        joined["onward"] = {"id": told[-1]["id"], "emitted": emitted}
    return [*(message for message in messages if message["type"] != "http.response.body"), joined]


async def serve_into(app: App, call: ProxiedRequest, number: int, outbox: ReplyQueue, where: str = "") -> None:
    """Serve a call, and put all that its answer brings into an outbox. Being cancelled is to the application as if the
    client had left, and so is an outbox that is closed, as by the death of its ingress.

    The message that ends the answer has one more entry, `FACTS`: what the server's log says of the request.

    where: is told as the header x-onward-replica.
    """
    gone, scope = asyncio.Event(), _scope(call)
    last: list[Any] = []
    requests = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Any:
        if requests:
            return requests.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if where and message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"x-onward-replica", where.encode())]}
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            last.append(message)  # the facts are known when the application has ended
        else:
            await outbox.put(number, message)

    running, closed = asyncio.ensure_future(app(scope, receive, send)), asyncio.ensure_future(outbox.closed())
    try:
        await asyncio.wait([running, closed], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        if last:
            access = scope.get("onward.access")
            await outbox.put(number, {**last[0], FACTS: {} if access is None else access.fields})
        closed.cancel()
        gone.set()
        if not running.done():
            await asyncio.wait([running], timeout=_LAST_WORDS)
            running.cancel()
        outbox.forget(number)


def _scope(call: ProxiedRequest) -> dict[str, Any]:
    begun: dict[str, Any] = {"answer": call.answer_key}
    if call.emitted is not None:
        begun["emitted"] = call.emitted
    if last := call.last_event_id or call.named_headers.get("last-event-id"):
        begun["last_event_id"] = last
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
        "onward": begun,
    }


# Seconds after which a channel without streams is closed.
_IDLE = 5.0
# Seconds in which the last words of an answer come after its call has ended.

_News = Reply | BaseException


class Channel:
    """The parcels of one replica, handed to the streams that they are for.

    is_wanted: whether it is to stay after so many seconds without streams. closed: is called when it ends.
    """

    def __init__(
        self, parcels: AsyncGenerator[ReplyBatch, None], is_wanted: Callable[[float], bool], closed: Callable[[], None]
    ) -> None:
        self._parcels, self._is_wanted, self._closed = parcels, is_wanted, closed
        self._streams: dict[int, asyncio.Queue[_News]] = {}
        self._used = time.monotonic()
        # In a context of its own: Ray ends with a request what was called in its context, and this serves others too.
        self._task = asyncio.get_running_loop().create_task(self._read(), context=contextvars.Context())

    def listen(self, number: int, news: asyncio.Queue[_News]) -> None:
        """Put what comes for a call into a queue."""
        self._streams[number] = news

    def leave(self, number: int) -> None:
        """Nobody listens for a call any more: what comes for it is dropped."""
        self._streams.pop(number, None)
        self._used = time.monotonic()

    async def _read(self) -> None:
        lost: Exception = ReplicaLostError("the replica's channel broke off", died=False)
        try:
            async for parcel in self._parcels:
                self._hand_out(parcel)
                if not self._streams and not self._is_wanted(time.monotonic() - self._used):
                    break
        except Exception as error:
            lost = error
        finally:
            self._closed()
            for news in self._streams.values():
                news.put_nowait(lost)
            await self._parcels.aclose()

    def _hand_out(self, parcel: ReplyBatch) -> None:
        for item in parcel.items:
            if (news := self._streams.get(item.number)) is not None:
                news.put_nowait(item)
        if parcel.is_beat:
            for number in self._streams.keys() - {item.number for item in parcel.items}:
                self._streams[number].put_nowait(Reply(parcel.replica, parcel.fingerprint))


class _ObservedRoute(RouteAttempt):
    """A route that tells of its replica. What is sent of it is a plain one."""

    def __init__(self, route: RouteAttempt, tell: Callable[[str], object]) -> None:
        super().__init__(route.key, route.avoid, route.only, route.replica)
        self._tell = tell

    def found(self, replica: str) -> None:
        super().found(replica)
        self._tell(replica)

    def __reduce__(self) -> tuple[type[RouteAttempt], tuple[str | None, frozenset[str], str | None, str | None]]:
        return RouteAttempt, (self.key, self.avoid, self.only, self.replica)


class ReplicaTransport(Protocol):
    """How replicas are reached."""

    @property
    def names(self) -> frozenset[str]:
        """Those that take requests now."""
        ...

    def call(
        self, call: ProxiedRequest, route: RouteAttempt, ingress: str, number: int
    ) -> tuple[Awaitable[None], Callable[[], None]]:
        """Have a replica serve a call (`serve_into`): what ends with it, and what ends it before. `route.found` is told
        who has it, in any thread."""
        ...

    def parcels(self, replica: str, ingress: str) -> AsyncGenerator[ReplyBatch, None]:
        """What a replica has for an ingress (`ReplyQueue.parcels`)."""
        ...


class ChannelReplicaSet:
    """Replicas whose answers come through channels: the calls themselves bring nothing but their end.

    What a replica says of an answer comes whole and in order, or the call is lost: a channel that ends is never taken
    up again, for later calls have channels of another name.
    """

    def __init__(self, remote: ReplicaTransport) -> None:
        self._remote = remote
        self._ingress = uuid.uuid4().hex  # what replicas know the present channels by
        self._numbers = itertools.count()
        self._channels: dict[tuple[str, str], Channel] = {}
        self._seeking: set[int] = set()  # calls that have no replica yet

    @property
    def names(self) -> frozenset[str]:
        """Those that take requests now."""
        return self._remote.names

    async def serve(self, call: ProxiedRequest, route: RouteAttempt) -> AsyncGenerator[Reply, None]:
        """Have a replica serve a call; closing the generator ends it there. `route.replica` says who has it. Raises
        `ReplicaLostError`: the replica is gone."""
        loop, stream = asyncio.get_running_loop(), _Stream(next(self._numbers))
        ingress = self._ingress

        def found(replica: str) -> None:
            route.found(replica)
            if not stream.is_closed:
                stream.listen_to(self._channel(replica, ingress))
                self._seeking.discard(stream.number)

        watched = _ObservedRoute(route, lambda replica: loop.call_soon_threadsafe(found, replica))
        self._seeking.add(stream.number)
        ended, end = self._remote.call(call, watched, ingress, stream.number)
        ending = asyncio.ensure_future(ended)
        ending.add_done_callback(stream.note_end)
        is_whole = False
        try:
            while not is_whole:
                item = await stream.next()
                is_whole = item.is_last
                yield item
        finally:
            self._seeking.discard(stream.number)
            stream.close()
            if not is_whole:
                end()

    def _channel(self, replica: str, ingress: str) -> Channel:
        key = replica, ingress
        if key not in self._channels:

            def closed() -> None:
                del self._channels[key]
                if self._ingress == ingress:
                    self._ingress = uuid.uuid4().hex

            def is_wanted(idle: float) -> bool:  # a replica that is to leave waits for its channels
                return replica in self.names and (idle < _IDLE or bool(self._seeking))

            self._channels[key] = Channel(self._remote.parcels(replica, ingress), is_wanted, closed)
        return self._channels[key]


class _Stream:
    """What comes for one call."""

    def __init__(self, number: int) -> None:
        self.number, self.is_closed = number, False
        self._news: asyncio.Queue[_News] = asyncio.Queue()
        self._channel: Channel | None = None

    def listen_to(self, channel: Channel) -> None:
        if self._channel is not None:  # the replica before did not take the call
            self._channel.leave(self.number)
        self._channel = channel
        channel.listen(self.number, self._news)

    async def next(self) -> Reply:
        news = await self._news.get()
        if isinstance(news, BaseException):
            raise news
        return news

    def note_end(self, ended: "asyncio.Future[None]") -> None:
        """The call has ended: what it brought may still be on its way."""
        if ended.cancelled():
            return
        if error := ended.exception():
            self._news.put_nowait(error)
        elif not self.is_closed:
            lost = ReplicaLostError("the replica's answer broke off", died=False)
            asyncio.get_running_loop().call_later(_LAST_WORDS, self._news.put_nowait, lost)

    def close(self) -> None:
        self.is_closed = True
        if self._channel is not None:
            self._channel.leave(self.number)
