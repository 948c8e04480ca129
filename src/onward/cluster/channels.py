"""What replicas send an ingress: one channel from each, whatever the number of streams."""

import asyncio
import contextvars
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from onward.cluster.call import Call, Item, Parcel, ReplicaLostError, Route

# Seconds after which a channel without streams is closed.
_IDLE = 5.0
# Seconds in which the last words of an answer come after its call has ended.
_LAST_WORDS = 5.0

_News = Item | BaseException


class Channel:
    """The parcels of one replica, handed to the streams that they are for.

    is_wanted: whether it is to stay after so many seconds without streams. closed: is called when it ends.
    """

    def __init__(
        self, parcels: AsyncGenerator[Parcel, None], is_wanted: Callable[[float], bool], closed: Callable[[], None]
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

    def _hand_out(self, parcel: Parcel) -> None:
        for item in parcel.items:
            if (news := self._streams.get(item.number)) is not None:
                news.put_nowait(item)
        if parcel.is_beat:
            for number in self._streams.keys() - {item.number for item in parcel.items}:
                self._streams[number].put_nowait(Item(parcel.replica, parcel.fingerprint))


class _Watched(Route):
    """A route that tells of its replica. What is sent of it is a plain one."""

    def __init__(self, route: Route, tell: Callable[[str], object]) -> None:
        super().__init__(route.key, route.avoid, route.only, route.replica)
        self._tell = tell

    def found(self, replica: str) -> None:
        super().found(replica)
        self._tell(replica)

    def __reduce__(self) -> tuple[type[Route], tuple[str | None, frozenset[str], str | None, str | None]]:
        return Route, (self.key, self.avoid, self.only, self.replica)


class Remote(Protocol):
    """How replicas are reached."""

    @property
    def names(self) -> frozenset[str]:
        """Those that take requests now."""
        ...

    def call(self, call: Call, route: Route, ingress: str, number: int) -> tuple[Awaitable[None], Callable[[], None]]:
        """Have a replica serve a call (`serve_into`): what ends with it, and what ends it before. `route.found` is told
        who has it, in any thread."""
        ...

    def parcels(self, replica: str, ingress: str) -> AsyncGenerator[Parcel, None]:
        """What a replica has for an ingress (`Outbox.parcels`)."""
        ...


class ChanneledReplicas:
    """Replicas whose answers come through channels: the calls themselves bring nothing but their end.

    What a replica says of an answer comes whole and in order, or the call is lost: a channel that ends is never taken
    up again, for later calls have channels of another name.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._ingress = uuid.uuid4().hex  # what replicas know the present channels by
        self._numbers = itertools.count()
        self._channels: dict[tuple[str, str], Channel] = {}
        self._seeking: set[int] = set()  # calls that have no replica yet

    @property
    def names(self) -> frozenset[str]:
        """Those that take requests now."""
        return self._remote.names

    async def serve(self, call: Call, route: Route) -> AsyncGenerator[Item, None]:
        """Have a replica serve a call; closing the generator ends it there. `route.replica` says who has it. Raises
        `ReplicaLostError`: the replica is gone."""
        loop, stream = asyncio.get_running_loop(), _Stream(next(self._numbers))
        ingress = self._ingress

        def found(replica: str) -> None:
            route.found(replica)
            if not stream.is_closed:
                stream.listen_to(self._channel(replica, ingress))
                self._seeking.discard(stream.number)

        watched = _Watched(route, lambda replica: loop.call_soon_threadsafe(found, replica))
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

    async def next(self) -> Item:
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
