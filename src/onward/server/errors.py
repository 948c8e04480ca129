"""Errors as HTTP responses."""

import math
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from onward.errors import EngineBusyError, OnwardError
from onward.protocols import error_fields, status_of
from onward.protocols.chat_events import as_json


class CompactJSONResponse(JSONResponse):
    """JSON in UTF-8. Lone surrogates, which UTF-8 cannot encode, are sent as JSON escapes."""

    def render(self, content: Any) -> bytes:
        return rendered(content)


def rendered(content: Any) -> bytes:
    return as_json(content).encode("utf-8", "backslashreplace")


# The message of a 500 response: the details are in the server's log only.
DEFECT = "the server failed to process this request; its log has the details"
_RETRY_AFTER = 5  # seconds, if no better estimate is known


def error_answer(error: OnwardError) -> CompactJSONResponse:
    """The response to an `OnwardError`, with the headers that its status calls for."""
    status = status_of(error)
    headers = {}
    if isinstance(error, EngineBusyError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = str(_RETRY_AFTER)
    elif status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    elif status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        headers["accept-encoding"] = "identity"  # RFC 9110, 15.5.16
    elif status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        headers["connection"] = "close"  # the rest of the body is unread
    return CompactJSONResponse({"error": error_fields(error)}, status, headers)


def plain_error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> CompactJSONResponse:
    """An error response without an `OnwardError`."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    fields: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": code}
    return CompactJSONResponse({"error": fields}, status, headers)
