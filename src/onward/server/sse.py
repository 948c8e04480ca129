"""Server-sent events: one write per client and engine step."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from onward.errors import OnwardError
from onward.protocols import Protocol
from onward.server.client import Client
from onward.server.errors import DEFECT
from onward.server.resume import EventWriter
from onward.server.settings import Settings
from onward.server.submission import ActiveRequest

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # else nginx buffers the events
}


class EventStream(Response):
    """A streaming response. The status and headers are sent immediately, while the request waits in the queue. ended:
    called when the stream ends for any reason. headers: additional response headers. before_end: called before the
    last events are sent."""

    def __init__(
        self,
        request: ActiveRequest,
        client: Client,
        writer: EventWriter,
        streams: "OpenStreams",
        ended: Callable[[], None],
        headers: Mapping[str, str],
        before_end: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers})
        del self.headers["content-length"]
        self._request, self._client, self._writer, self._streams = request, client, writer, streams
        self._ended, self._before_end, self._reports = ended, before_end, False
        # The running requests, with the number of pieces sent of each.
        self._sent = dict.fromkeys(range(len(self._request.generations)), 0)
        self._changed = asyncio.Event()
        self._wants_comment = False
        self._sending_since: float | None = None
        self._last_sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._reports = "onward" in scope
        try:
            self._streams.open.add(self)
            self._client.on_disconnect(self._leave)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            stops = [generation.watch(self._changed.set) for generation in self._request.generations]
            try:
                await self._stream(send)
            finally:
                for stop in stops:
                    stop()
        finally:
            self._streams.open.discard(self)
            self._ended()

    def tick(self, now: float, settings: Settings) -> None:
        """Called periodically: send a comment on an idle stream, give up on one that the client doesn't read."""
        if self._sending_since is not None:
            if now - self._sending_since > settings.stalled_seconds:
                self._leave()
        elif now - self._last_sent > settings.keep_alive:
            self._wants_comment = True
            self._changed.set()

    def _leave(self) -> None:
        self._client.disconnected = True
        self._request.leave(self._client)
        self._changed.set()

    async def _stream(self, send: Send) -> None:
        await self._send(send, "".join(self._writer.begin()))
        while not self._client.disconnected:
            self._changed.clear()
            events: list[str] = []
            try:
                self._add_events(events)
            except Exception as error:
                self._request.cancel()
                shown = error if isinstance(error, OnwardError) else OnwardError(DEFECT)
                await self._send(send, "".join([*events, *self._writer.error(shown)]), is_last=True)
                if shown is not error:
                    raise
                return
            if not self._sent:
                if self._before_end is not None:
                    await self._before_end()
                await self._send(send, "".join([*events, *self._writer.finish()]), is_last=True)
                return
            await self._send(send, "".join(events))
            await self._changed.wait()
            if self._wants_comment:
                self._wants_comment = False
                await self._send(send, self._request.body.protocol.idle)

    def _add_events(self, events: list[str]) -> None:
        """Append the events since the last call. Raises the error of a failed request."""
        for at, count in list(self._sent.items()):
            generation = self._request.generations[at]
            has_ended = generation.done  # read before the pieces, so that none are missed
            if pieces := generation.pieces(count):
                self._sent[at] += len(pieces)
                events += self._writer.pieces(at, pieces)
            if has_ended:
                del self._sent[at]
                events += self._writer.end(at, self._request.completion(at))

    async def _send(self, send: Send, text: str, *, is_last: bool = False) -> None:
        """Send part of the body. Waits if the client reads more slowly than tokens are generated."""
        if not text and not is_last:
            return
        self._last_sent = self._sending_since = time.monotonic()
        body = text.encode("utf-8", "backslashreplace")
        message: Message = {"type": "http.response.body", "body": body, "more_body": not is_last}
        if self._reports:
            message["onward"] = self._writer.report()
        await send(message)
        self._sending_since = None


class OpenStreams:
    """All open streams of a server. They are checked once a second, and so is `tick` called."""

    def __init__(self, settings: Settings, tick: Callable[[], None]) -> None:
        self._settings, self._tick = settings, tick
        self.open: set[EventStream] = set()

    async def watch(self) -> None:
        """Check them until cancelled."""
        pause = min(1.0, self._settings.keep_alive / 2 or 1.0, self._settings.stalled_seconds / 2 or 1.0)
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            self._tick()
            for stream in list(self.open):
                stream.tick(now, self._settings)


# Seconds between comments on a load. The headers are sent after as long: until then, an error gets a status of its own.
_LOADING_PAUSE = 1.0


async def waits_for_model(client: Client, submitting: "asyncio.Future[Any]") -> bool:
    """Wait until a body's requests are submitted or fail. Returns early, and True, if the response is a stream whose
    model takes long to load."""
    try:
        while True:
            await asyncio.wait({submitting}, timeout=_LOADING_PAUSE)
            if submitting.done():
                return False
            if client.pending is not None and client.pending.stream:
                return True
    except BaseException:
        submitting.cancel()
        raise


class LoadingStream(Response):
    """A stream whose model is still being loaded: comments say how far the load is, then the response comes.

    submitting: the submission of its requests. answer: makes the response from what was submitted. refused: called with
    an error that is sent as an event.
    """

    def __init__(
        self,
        client: Client,
        submitting: "asyncio.Future[Any]",
        answer: Callable[[Any], Awaitable[Response]],
        protocol: Protocol,
        refused: Callable[[OnwardError], None],
    ) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._client, self._submitting, self._answer = client, submitting, answer
        self._protocol, self._refused = protocol, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_body(message: Message) -> None:
            if message["type"] != "http.response.start":  # it was sent
                await send(message)

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not self._submitting.done():
                if (pending := self._client.pending) is not None:
                    comment = f": {pending.lease.progress()}\n\n".encode()
                    await send({"type": "http.response.body", "body": comment, "more_body": True})
                await asyncio.wait({self._submitting}, timeout=_LOADING_PAUSE)
            active = self._submitting.result()
        except BaseException as error:
            self._submitting.cancel()
            self._client.close()
            if isinstance(error, OnwardError):
                self._refused(error)
                event = self._protocol.early_error(error).encode()
                await send({"type": "http.response.body", "body": event, "more_body": False})
            elif not isinstance(error, ClientDisconnect):
                raise
            return
        await (await self._answer(active))(scope, receive, send_body)
