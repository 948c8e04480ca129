"""The other end of a request: what it sends, and whether it is still there."""

import asyncio
import contextlib
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from onward.openai import BodyError
from onward.server.settings import Settings


async def read_body(request: Request, settings: Settings) -> bytes:
    """The body of a request.

    Raises:
        BodyError: it is too large, no JSON by its own account, or does not arrive.
        ClientDisconnect: the client has left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"a body must be JSON, with the header 'Content-Type: application/json'; got {kind or 'none'!r}"
        raise BodyError(message, code="unsupported_media_type", status=415)
    parts: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.stream():
                length += len(part)
                if length > settings.max_body:
                    raise too_large(settings)
                parts.append(part)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_seconds:g} s"
        raise BodyError(message, code="request_timeout", status=408) from None
    return b"".join(parts)


def too_large(settings: Settings) -> BodyError:
    return BodyError(f"a body has {settings.max_body} bytes at most", code="body_too_large", status=413)


class Client:
    """Tells when a client leaves whose body has been read. `leaves` is called then, in this loop."""

    def __init__(self, receive: Receive, leaves: Callable[[], None] | None = None) -> None:
        self.gone = False
        self._leaves = leaves
        self._task = asyncio.create_task(self._listen(receive))

    def on_leave(self, leaves: Callable[[], None]) -> None:
        """Call `leaves()` when the client leaves, at once where it has."""
        self._leaves = leaves
        if self.gone:
            leaves()

    def close(self) -> None:
        """Listen no longer."""
        self._task.cancel()

    async def _listen(self, receive: Receive) -> None:
        with contextlib.suppress(ClientDisconnect):
            while True:
                message: Message = await receive()
                if message["type"] == "http.disconnect":
                    break
        self.gone = True
        if self._leaves is not None:
            self._leaves()
