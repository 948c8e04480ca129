"""The generation endpoints: one for each protocol."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from onward import __version__
from onward.errors import OnwardError
from onward.protocols import PROTOCOLS, ParsedBody, Protocol, ResponseKey
from onward.server.client import Client, check_headers, whole_body
from onward.server.documented import EVENTS, HEADERS, BodyRoute, errors
from onward.server.gate import CLIENT_CLOSED, access_of
from onward.server.models import ServedModel, Settings
from onward.server.resume import ResumeRequest
from onward.server.service import Service, parsed
from onward.server.sse import EventStream, OpenStreams
from onward.server.submission import ActiveRequest
from onward.tokenizer import Tokenizer

_ERRORS = (400, 404, 408, 409, 413, 415, 422, 429, 500, 503)


def router(service: Service, streams: OpenStreams) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute)
    for protocol in PROTOCOLS.values():
        _add(routes, service, streams, protocol)
    return routes


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
        responses={200: {"content": EVENTS}, **errors(*_ERRORS)},
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
    raw = await read_logged(request, service.settings)
    client = Client(request, len(raw))
    read_raw = partial(read, raw)
    del raw
    try:
        subscriber = await service.submit(client, read_raw, resume)
        del read_raw
    except BaseException:
        client.close()
        raise

    active = subscriber.request

    def finish_request() -> None:
        client.close()
        service.finish(subscriber)
        access_of(request.scope).fields |= active.log_fields()

    protocol, tokenizer = active.body.protocol, _tokenizer(active)
    headers = {"x-onward-ignored": ", ".join(active.body.ignored)} if active.body.ignored else {}
    if active.body.stream:
        try:
            events = protocol.events(active.body, tokenizer, __version__)
            return EventStream(subscriber, events, client, streams, finish_request, headers)
        except BaseException:  # the stream will not call it
            finish_request()
            raise
    try:
        completions = await active.completions()
        answer = partial(protocol.answer, active.body, completions, tokenizer, __version__)
        return await service.respond(client, active, answer, headers)
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


def _tokenizer(active: ActiveRequest) -> Tokenizer:
    tokenizer = active.served.engine.lm.tokenizer
    assert tokenizer is not None, "served models have one"
    return tokenizer
