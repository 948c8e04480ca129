"""Parts of the OpenAPI document: errors, headers, and routes that read their own bodies."""

from collections.abc import Callable, Coroutine
from typing import Any, Literal

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response


class Error(BaseModel):
    """The reason of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The response to a request that failed or was refused."""

    error: Error


class ModelEntry(BaseModel):
    """A model, or an adapter of the model `parent`. chat_template: whether there is one, which chats need.
    default_options: the numbers that apply where a body leaves them out; max_new_tokens null: up to the context length.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    chat_template: bool
    default_options: dict[str, int | float | None]
    parent: str | None = None


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelEntry]


class BodyRoute(APIRoute):
    """A route whose endpoint reads the body itself, with time and size limits, in a reader's thread. The endpoint's
    argument `body` only gives the body's type for the document; it is always None."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def handle(request: Request) -> Response:
            return await self.endpoint(request, None)  # type: ignore[no-any-return]

        return handle


_ERRORS = {
    400: "The request is invalid.",
    401: "The API key is missing or wrong.",
    403: "The Host header is not an allowed name.",
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    409: "The stream was started by an engine that would generate different text.",
    413: "The body is too large.",
    415: "Content-Type is not application/json.",
    422: "The Last-Event-ID or Idempotency-Key was used with another body.",
    429: "The queue is full; Retry-After says when to retry.",
    431: "The headers are too large.",
    500: "Internal server error.",
    503: "The server takes no requests; Retry-After says when to retry.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of error responses; 401 and 403 are always among them."""
    return {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in (401, 403, *statuses)}


HEADERS = [
    {"name": name, "in": "header", "required": False, "description": description, "schema": {"type": "string"}}
    for name, description in (
        ("Last-Event-ID", "The id of a stream's event. The same body is answered with the events after it."),
        ("Idempotency-Key", "The same body with the same key gets the same answer."),
    )
]
EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}
