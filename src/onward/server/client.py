"""The other end of a request: what it sends, and whether it is still there."""

import asyncio
import contextlib
from collections.abc import Callable
from email.message import Message

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from onward.protocols import BodyError
from onward.server.models import Settings


async def read_body(request: Request, settings: Settings) -> bytes:
    """The body of a request, if its headers say that it is JSON in UTF-8. Raises `BodyError`: they do not, or as
    `whole_body` raises it. Raises `ClientDisconnect`: the client has left."""
    _check_kind(request.headers)
    return await whole_body(request, settings)


async def whole_body(request: Request, settings: Settings) -> bytes:
    """The body of a request. Raises `BodyError`: it is too large, or does not arrive. Raises `ClientDisconnect`: the
    client has left."""
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


def _check_kind(headers: Headers) -> None:
    """Raise unless a body is JSON, in UTF-8 and not compressed, by its headers."""
    message = Message()
    message["content-type"] = headers.get("content-type", "")
    kind, charset = message.get_content_type(), message.get_content_charset("utf-8")
    if not headers.get("content-type") or kind != "application/json":
        given = headers.get("content-type", "").partition(";")[0].strip() or "none"
        text = f"a body must be JSON, with the header 'Content-Type: application/json'; got {given!r}"
        raise BodyError(text, code="unsupported_media_type", status=415)
    if charset not in _CHARSETS:
        text = f"a body must be in UTF-8; Content-Type has the charset {charset!r}"
        raise BodyError(text, code="unsupported_charset", status=415)
    codings = [coding.strip().lower() for coding in ",".join(headers.getlist("content-encoding")).split(",")]
    if encoded := [coding for coding in codings if coding not in ("", "identity")]:
        text = f"a body must not be compressed; got Content-Encoding {', '.join(encoded)!r}: send it as it is"
        raise BodyError(text, code="unsupported_content_encoding", status=415)


def too_large(settings: Settings) -> BodyError:
    return BodyError(f"a body has {settings.max_body} bytes at most", code="body_too_large", status=413)


# ASCII is UTF-8, too.
_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")


class Client:
    """Tells when a client leaves whose body has been read."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._leaves: Callable[[], None] | None = None
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
                message = await receive()
                if message["type"] == "http.disconnect":
                    break
        self.gone = True
        if self._leaves is not None:
            self._leaves()
