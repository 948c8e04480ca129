"""Streams of server-sent events: one write for all that a step brings a client."""

import asyncio
import time
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from onward.errors import OnwardError
from onward.server.client import Client
from onward.server.errors import DEFECT
from onward.server.models import Settings
from onward.server.resume import AnswerEvents
from onward.server.submission import Subscriber

_COMMENT = b": waiting\n\n"
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx collects the events
}


class EventStream(Response):
    """The answer to a submission as a stream. The status and the headers go out at once, while it waits in the queue.

    ended: is called after it, in any case.
    """

    def __init__(
        self,
        recipient: Subscriber,
        events: AnswerEvents,
        client: Client,
        streams: "OpenStreams",
        ended: Callable[[], None],
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._recipient, self._submission = recipient, recipient.submission
        self._client, self._streams = client, streams
        self._teller = recipient.teller(events)
        self._ended = ended
        # The requests that go on, and how many pieces of each were told.
        self._going_on = dict.fromkeys(range(len(self._submission.generations)), 0)
        self._changed = asyncio.Event()
        self._wants_comment = False
        self._sending_since: float | None = None
        self._last_sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._streams.open.add(self)
            self._client.on_leave(self._leave)
            await self._stream(send)
        finally:
            self._streams.open.discard(self)
            self._ended()

    def tick(self, now: float, settings: Settings) -> None:
        """Now and then: comment where nothing has been sent for long, give up where nothing is read."""
        if self._sending_since is not None:
            if now - self._sending_since > settings.stalled_seconds:
                self._leave()
        elif now - self._last_sent > settings.keep_alive:
            self._wants_comment = True
            self._changed.set()

    def _leave(self) -> None:
        self._client.gone = True
        self._recipient.leave()
        self._changed.set()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        generations = self._submission.generations
        ends = [generation.watch(self._changed.set) for generation in generations]
        try:
            await self._events_of(send)
        finally:
            for end in ends:
                end()

    async def _events_of(self, send: Send) -> None:
        await self._send(send, self._teller.begin())
        while not self._client.gone:
            self._changed.clear()
            events: list[str] = []
            try:
                self._add_news(events)
            except Exception as error:
                self._submission.cancel()
                told = error if isinstance(error, OnwardError) else OnwardError(DEFECT)
                await self._send(send, [*events, *self._teller.error(told)], is_last=True)
                if told is not error:
                    raise
                return
            if not self._going_on:
                await self._send(send, [*events, *self._teller.finish()], is_last=True)
                return
            await self._send(send, events)
            await self._changed.wait()
            if self._wants_comment:
                self._wants_comment = False
                await self._write(send, _COMMENT, is_last=False)

    def _add_news(self, events: list[str]) -> None:
        """Add what has come since the last time. Raises what made a request fail."""
        for at, told in list(self._going_on.items()):
            generation = self._submission.generations[at]
            has_ended = generation.done  # before its last pieces are looked for
            if pieces := generation.pieces(told):
                self._going_on[at] += len(pieces)
                events += self._teller.pieces(at, pieces)
            if has_ended:
                del self._going_on[at]
                events += self._teller.end(at, self._submission.completion(at))

    async def _send(self, send: Send, events: Sequence[str], *, is_last: bool = False) -> None:
        if events or is_last:
            await self._write(send, "".join(events).encode("utf-8", "backslashreplace"), is_last=is_last)

    async def _write(self, send: Send, content: bytes, *, is_last: bool) -> None:
        """Waits where the client reads more slowly than the texts grow."""
        self._last_sent = self._sending_since = time.monotonic()
        message: Message = {"type": "http.response.body", "body": content, "more_body": not is_last}
        if self._recipient.handover.reports:
            message["onward"] = {"emitted": self._teller.emitted(), "id": self._teller.id}
        await send(message)
        self._sending_since = None


class OpenStreams:
    """All streams of a server, looked at once a second."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.open: set[EventStream] = set()

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        pause = min(1.0, self._settings.keep_alive / 2 or 1.0, self._settings.stalled_seconds / 2 or 1.0)
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            for stream in list(self.open):
                stream.tick(now, self._settings)
