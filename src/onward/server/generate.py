"""The endpoints that read a body: one for each protocol, /tokenize and /detokenize."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from onward import __version__
from onward.errors import OnwardError
from onward.protocols import PROTOCOLS, BodyReader, ParsedBody, Protocol, ResponseKey
from onward.protocols.tokenize import DetokenizeBody, Text, TokenizeBody, Tokens, detokenized, tokenized
from onward.server.client import Client, check_headers, whole_body
from onward.server.gate import CLIENT_CLOSED, access_of
from onward.server.resume import EventWriter, ResumeRequest
from onward.server.service import ServedModel, Service, parsed
from onward.server.settings import Settings
from onward.server.sse import EventStream, OpenStreams


class Error(BaseModel):
    """The reason of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The response to a request that failed or was refused."""

    error: Error


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
        ("Last-Event-ID", "The id of an event of a stream of one text: the events after it are sent."),
        ("Idempotency-Key", "The same body with the same key gets the same answer."),
    )
]
EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}


def router(service: Service, streams: OpenStreams) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute)
    for protocol in PROTOCOLS.values():
        _add(routes, service, streams, protocol)

    async def respond(request: Request, answer: Callable[[BodyReader, dict[str, Any]], dict[str, Any]]) -> Response:
        raw = await _read_logged(request, service.settings)

        def make() -> dict[str, Any]:
            fields = parsed(raw)
            return answer(service.models.find(fields.get("model")).reader, fields)

        client = Client(request, len(raw))
        try:
            return await service.respond(client, make, len(raw))
        finally:
            client.close()

    documented = errors(*_TEXT_ERRORS)

    @routes.post("/tokenize", response_model=Tokens, responses=documented, summary="Tokenize a text or a chat.")
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        return await respond(request, tokenized)

    @routes.post("/detokenize", response_model=Text, responses=documented, summary="Decode token ids to text.")
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        return await respond(request, detokenized)

    return routes


_TEXT_ERRORS = (400, 404, 408, 413, 415, 422, 500, 503)


def _add(routes: APIRouter, service: Service, streams: OpenStreams, protocol: Protocol) -> None:
    def read(raw: bytes, key: ResponseKey) -> tuple[ServedModel, ParsedBody]:
        fields = parsed(raw)
        served = service.models.find(fields.get("model"))
        return served, served.reader.read(protocol.path, fields, key)

    async def generate(request: Request, body: Any) -> Response:
        return await _respond(service, streams, request, read)

    generate.__annotations__["body"] = protocol.body
    routes.post(
        protocol.path.removeprefix("/v1"),
        summary=protocol.summary,
        response_model=protocol.response,
        responses={200: {"content": EVENTS}, **errors(*sorted((*_TEXT_ERRORS, 409, 429)))},
        openapi_extra={"parameters": HEADERS},
    )(generate)


async def _respond(
    service: Service,
    streams: OpenStreams,
    request: Request,
    read: Callable[[bytes, ResponseKey], tuple[ServedModel, ParsedBody]],
) -> Response:
    """Read a body, submit its requests, and respond with JSON or a stream."""
    resume = ResumeRequest.of(request.scope)
    raw = await _read_logged(request, service.settings)
    client = Client(request, len(raw))
    read_raw = partial(read, raw)
    del raw
    try:
        active = await service.submit(client, read_raw, resume)
        del read_raw
    except BaseException:
        client.close()
        raise

    def finish_request() -> None:
        client.close()
        service.finish(active, client)
        access_of(request.scope).fields |= active.log_fields()

    protocol, tokenizer = active.body.protocol, active.engine.lm.tokenizer
    assert tokenizer is not None, "served models have one"
    headers = {"x-onward-ignored": ", ".join(active.body.ignored)} if active.body.ignored else {}
    if active.body.stream:
        try:
            events = protocol.events(active.body, tokenizer, __version__)
            writer = EventWriter(events, active.body, active.prefix, resume)
            return EventStream(active, client, writer, streams, finish_request, headers)
        except BaseException:  # the stream will not call it
            finish_request()
            raise
    try:
        completions = await active.completions()
        answer = partial(protocol.answer, active.body, completions, tokenizer, __version__)
        return await service.respond(client, answer, active.nbytes, headers)
    except OnwardError:
        if client.disconnected:
            return Response(status_code=CLIENT_CLOSED)
        raise
    finally:
        finish_request()


async def _read_logged(request: Request, settings: Settings) -> bytes:
    """Read a JSON body, and add it to the access log with --log-prompts. Raises `BodyError`."""
    check_headers(request.headers)
    raw = await whole_body(request, settings, request.scope["onward.memory"])
    if settings.log_prompts:
        access_of(request.scope).fields["body"] = raw.decode("utf-8", "replace")
    return raw
