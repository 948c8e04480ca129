"""Errors as answers."""

import math
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from onward.errors import EngineBusyError, OnwardError
from onward.protocols import error_fields, status_of
from onward.protocols.chat_events import as_json


class CompactJSONResponse(JSONResponse):
    """JSON in UTF-8. Half a character, which JSON can write and UTF-8 cannot, goes back as JSON writes it."""

    def render(self, content: Any) -> bytes:
        return rendered(content)


def rendered(content: Any) -> bytes:
    """The body of an answer."""
    return as_json(content).encode("utf-8", "backslashreplace")


# All that a client is told where something is wrong with the server.
DEFECT = "the server has failed at this request; its log says why"
# Seconds after which to come back, where nothing better is known.
_RETRY = 5


def error_answer(error: OnwardError) -> CompactJSONResponse:
    """The answer that says what is wrong, whose fault it is, and when to come back."""
    status = status_of(error)
    headers = {}
    if isinstance(error, EngineBusyError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = str(_RETRY)
    elif status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    elif status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        headers["accept-encoding"] = "identity"  # RFC 9110, 15.5.16
    elif status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        headers["connection"] = "close"  # the rest of the body is not read
    return CompactJSONResponse({"error": error_fields(error)}, status, headers)


def plain_error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> CompactJSONResponse:
    """An error that is no `OnwardError`."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    fields: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": code}
    return CompactJSONResponse({"error": fields}, status, headers)


def defect_answer() -> CompactJSONResponse:
    """The answer where something is wrong with the server. What, is in its log alone."""
    return plain_error(500, DEFECT, "internal_error")
