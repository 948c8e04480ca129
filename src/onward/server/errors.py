"""Errors as HTTP responses."""

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from onward.errors import EngineBusyError, OnwardError
from onward.protocols import BodyError, protocol_of, status_of
from onward.protocols.choices import as_json
from onward.server.client import MemoryFullError

_PART = 64 * 2**10  # bytes of an answer that are written at once


class CompactJSONResponse(JSONResponse):
    """JSON in UTF-8. Lone surrogates, which UTF-8 cannot encode, are sent as JSON escapes."""

    def render(self, content: Any) -> bytes:
        return rendered(content)


class WholeResponse(Response):
    """JSON that is written in parts, as the client reads it. seconds: how long a part may stay unread before the server
    closes the connection."""

    media_type = "application/json"

    def __init__(self, content: bytes, seconds: float, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, headers=headers)
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        content, self.body = memoryview(self.body), b""
        with contextlib.suppress(TimeoutError):
            for at in range(0, len(content), _PART):
                body, more = bytes(content[at : at + _PART]), at + _PART < len(content)
                async with asyncio.timeout(self._seconds):
                    await send({"type": "http.response.body", "body": body, "more_body": more})


# The depth of logprob entries in a response, and the number of ids or bytes in a list that are written at once.
_DEPTH, _RUN = 6, 4096


def rendered(content: Any) -> bytes:
    """Compact JSON in UTF-8. A large response is encoded in parts, because the encoder blocks other threads."""
    return "".join(_parts(content, _DEPTH)).encode("utf-8", "backslashreplace")


def _parts(value: Any, depth: int) -> Iterator[str]:
    if not depth or not value or not isinstance(value, dict | list):
        yield as_json(value)
        return
    if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        runs = (as_json(value[at : at + _RUN])[1:-1] for at in range(0, len(value), _RUN))
        yield f"[{','.join(runs)}]"
        return
    is_object = isinstance(value, dict)
    separator = "{" if is_object else "["
    for item in value:
        yield f"{separator}{as_json(str(item))}:" if is_object else separator
        yield from _parts(value[item] if is_object else item, depth - 1)
        separator = ","
    yield "}" if is_object else "]"


# The message of a 500 response: the details are in the server's log only.
DEFECT = "the server failed to process this request; its log has the details"
_RETRY_AFTER = 5  # seconds, if no better estimate is known


def error_answer(
    error: OnwardError, url: str = "", request_id: str = "", headers: Mapping[str, str] | None = None
) -> CompactJSONResponse:
    """The response to an `OnwardError`, with the headers that its status calls for. url: its path, whose protocol
    determines the format. headers: further ones."""
    status = status_of(error)
    headers = {**(headers or {})}
    if isinstance(error, EngineBusyError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = str(_RETRY_AFTER)
        if isinstance(error, MemoryFullError):
            headers["connection"] = "close"  # the rest of the body is unread
    elif status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    elif status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        headers["accept-encoding"] = "identity"  # RFC 9110, 15.5.16
    elif status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        headers["connection"] = "close"  # the rest of the body is unread
    return CompactJSONResponse(protocol_of(url).error(error, request_id), status, headers)


def draining_answer() -> CompactJSONResponse:
    """The answer of /ready while the server shuts down."""
    return error_answer(BodyError("the server is shutting down", code="draining", status=503))
