"""An ASGI application called within its process, and what its answers bring on its way to their ingress."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from onward.cluster.call import FACTS, Call, Item, Parcel

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


class Outbox:
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

    async def parcels(self) -> AsyncGenerator[Parcel, None]:
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
                yield Parcel(self._replica, self._fingerprint, self._take(), is_beat)
                self._close_if_lost()
        finally:
            self.close()

    def _take(self) -> tuple[Item, ...]:
        items = tuple(
            Item(self._replica, self._fingerprint, tuple(_joined(messages)), number in self._ended, number)
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


async def serve_into(app: App, call: Call, number: int, outbox: Outbox, where: str = "") -> None:
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


def _scope(call: Call) -> dict[str, Any]:
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
