"""A stream whose model is still being loaded: comments say how far the load is, until the stream itself begins."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from onward.errors import OnwardError
from onward.protocols import Protocol
from onward.server.client import Client
from onward.server.sse import STREAM_HEADERS

# Seconds between comments. The headers are sent after as long: until then, an error gets a status of its own.
_PAUSE = 1.0


async def waits_for_model(client: Client, submitting: "asyncio.Future[Any]") -> bool:
    """Wait until a body's requests are submitted or fail. Returns early, and True, if the response is a stream whose
    model takes long to load."""
    try:
        while True:
            await asyncio.wait({submitting}, timeout=_PAUSE)
            if submitting.done():
                return False
            if client.pending is not None and client.pending.stream:
                return True
    except BaseException:
        submitting.cancel()
        raise


class LoadingStream(Response):
    """Sends comments while a model is loaded, then the response. submitting: the submission of its requests. answer:
    makes the response from what was submitted. refused: called with an error that is sent as an event."""

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
                await asyncio.wait({self._submitting}, timeout=_PAUSE)
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
