"""The endpoints that read a body: one for each protocol, /tokenize and /detokenize."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.encoders import jsonable_encoder
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from onward import __version__
from onward.errors import OnwardError
from onward.protocols import PROTOCOLS, BodyError, BodyReader, Limits, ParsedBody, Protocol, ResponseKey
from onward.protocols.body import Validation, validated
from onward.protocols.count_tokens import TokenCount, counted
from onward.protocols.messages import CountBody, Messages
from onward.protocols.protocol import ErrorBody
from onward.protocols.tokenize import DetokenizeBody, Text, TokenizeBody, Tokens, detokenized, tokenized
from onward.server.client import Client, check_headers, owner_of, whole_body
from onward.server.errors import CompactJSONResponse
from onward.server.gate import CLIENT_CLOSED, access_of
from onward.server.loading_stream import LoadingStream, waits_for_model
from onward.server.response_store import RESPONSE
from onward.server.resume import EventWriter, ResumeRequest
from onward.server.served import ModelPending, ServedModel
from onward.server.service import Service, parsed
from onward.server.settings import Settings
from onward.server.sse import EventStream, OpenStreams
from onward.server.submission import ActiveRequest


class BodyRoute(APIRoute):
    """A route whose endpoint reads the body itself, with time and size limits, in a reader's thread. The endpoint's
    argument `body` only gives the body's type for the document; it is always None."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def handle(request: Request) -> Response:
            return await self.endpoint(request, None, **request.path_params)  # type: ignore[no-any-return]

        return handle


_SCHEMAS = "#/components/schemas/"
_ERRORS = {
    400: "The request is invalid.",
    401: "The API key is missing or wrong.",
    403: "The Host header is not an allowed name, or the server does not permit it.",
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    409: "The stream was started by an engine that would generate different text, or the model serves requests.",
    413: "The body is too large.",
    415: "Content-Type is not application/json.",
    422: "The Last-Event-ID or Idempotency-Key was used with another body.",
    429: "The queue is full; Retry-After says when to retry.",
    431: "The headers are too large.",
    500: "Internal server error.",
    503: "The server takes no requests; Retry-After says when to retry.",
}


def errors(*statuses: int, model: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The documentation of error responses; 401 and 403 are always among them. model: of their bodies."""
    return {status: described(_ERRORS[status], model) for status in (401, 403, *statuses)}


def described(text: str, model: type[BaseModel] = ErrorBody) -> dict[str, Any]:
    """The documentation of one error response. It refers to the model of its body: for a `model` of each response
    FastAPI makes a validator that nobody uses, and these took half of the time in which an application is made."""
    return {"description": text, "content": {"application/json": {"schema": {"$ref": _SCHEMAS + model.__name__}}}}


def error_schemas() -> dict[str, Any]:
    """The schemas of the bodies of error responses, by name."""
    found: dict[str, Any] = {}
    models: set[type[BaseModel]] = {ErrorBody, *(protocol.failure for protocol in PROTOCOLS.values())}
    for model in models:
        schema = model.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}", mode="serialization")
        found |= {**schema.pop("$defs", {}), model.__name__: schema}
    return dict(jsonable_encoder(found, exclude_none=True))  # as FastAPI writes the others


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
        raw = await read_logged(request, service.settings)

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

    path, of_messages = Messages.path.removeprefix("/v1"), errors(*_TEXT_ERRORS, model=Messages.failure)

    @routes.post(
        f"{path}/count_tokens", response_model=TokenCount, responses=of_messages, summary="Count a message's prompt."
    )
    async def count_tokens(request: Request, body: CountBody) -> Response:
        return await respond(request, counted)

    return routes


_TEXT_ERRORS = (400, 404, 408, 413, 415, 422, 500, 503)


def _add(routes: APIRouter, service: Service, streams: OpenStreams, protocol: Protocol) -> None:
    limits, ignores = Limits.of(service.settings.limits), service.settings.ignore_unsupported

    def read(raw: bytes, client: str, is_proxied: bool, key: ResponseKey) -> tuple[ServedModel, ParsedBody]:
        fields = parsed(raw)
        try:
            served = service.models.find(
                fields.get("model"), partial(validated, protocol.body, fields, Validation(limits, ignores))
            )
        except ModelPending as pending:
            pending.stream = fields.get("stream") is True
            raise
        stored = service.stored_items(client, f"{RESPONSE}{key.text}")
        body = served.reader.read(protocol.path, fields, key, stored=stored)
        if body.background and is_proxied:
            message = "background is not supported by onward deploy: remove it, and stream the response instead"
            raise BodyError(message, "background", "unsupported_value")
        return served, body

    async def generate(request: Request, body: Any) -> Response:
        return await _respond(service, streams, request, protocol, read)

    generate.__annotations__["body"] = protocol.body
    routes.post(
        protocol.path.removeprefix("/v1"),
        summary=protocol.summary,
        response_model=protocol.response,
        responses={200: {"content": EVENTS}, **errors(*sorted((*_TEXT_ERRORS, 409, 429)), model=protocol.failure)},
        openapi_extra={"parameters": HEADERS},
    )(generate)


async def _respond(
    service: Service,
    streams: OpenStreams,
    request: Request,
    protocol: Protocol,
    read: Callable[[bytes, str, bool, ResponseKey], tuple[ServedModel, ParsedBody]],
) -> Response:
    """Read a body, submit its requests, and respond with JSON or a stream."""
    resume = ResumeRequest.of(request.scope)
    raw = await read_logged(request, service.settings)
    client = Client(request, len(raw))
    read_raw = partial(read, raw, client.name, "onward" in request.scope)
    del raw
    submission = service.submit(client, read_raw, resume)
    answer = partial(_answer, service, streams, request, client, resume)
    try:
        if service.models.are_fixed:
            active = await submission
        elif await waits_for_model(client, submitting := asyncio.ensure_future(submission)):
            refused = partial(service.note_refusal, access=access_of(request.scope))
            return LoadingStream(client, submitting, answer, protocol, refused)
        else:
            active = submitting.result()
        del read_raw, submission
    except BaseException:
        client.close()
        raise
    return await answer(active)


async def _answer(
    service: Service,
    streams: OpenStreams,
    request: Request,
    client: Client,
    resume: ResumeRequest,
    active: ActiveRequest,
) -> Response:
    """Respond to a body whose requests have been submitted."""

    def finish_request() -> None:
        client.close()
        service.finish(active, client)
        access = access_of(request.scope)
        access.fields |= active.log_fields()
        if access.span is not None:
            access.span.add(active.generations)

    protocol, tokenizer = active.body.protocol, active.engine.lm.tokenizer
    assert tokenizer is not None, "served models have one"
    headers = {"x-onward-ignored": ", ".join(active.body.ignored)} if active.body.ignored else {}
    if active.body.stream:
        try:
            events: Any = protocol.events(active.body, tokenizer, __version__)
            writer = EventWriter(events, active.body, active.prefix, resume)

            async def put() -> None:
                await service.run(client.name, lambda: service.put(client.name, active.body, events.final))

            before_end = None if active.body.storage is None else put
            return EventStream(active, client, writer, streams, finish_request, headers, before_end)
        except BaseException:  # the stream will not call it
            finish_request()
            raise
    try:
        if active.body.background and service.background is not None:
            queued = await service.background.start(active, owner_of(client.name))
            return CompactJSONResponse(queued, headers=headers)
        completions = await active.completions()

        def answer() -> dict[str, Any]:
            response = protocol.answer(active.body, completions, tokenizer, __version__)
            service.put(client.name, active.body, response)
            return response

        return await service.respond(client, answer, active.nbytes, headers)
    except OnwardError:
        if client.disconnected:
            return Response(status_code=CLIENT_CLOSED)
        raise
    finally:
        finish_request()


async def read_logged(request: Request, settings: Settings) -> bytes:
    """Read a JSON body, and add it to the access log with --log-prompts. Raises `BodyError`."""
    check_headers(request.headers)
    raw = await whole_body(request, settings, request.scope["onward.memory"])
    if settings.log_prompts:
        access_of(request.scope).fields["body"] = raw.decode("utf-8", "replace")
    return raw
