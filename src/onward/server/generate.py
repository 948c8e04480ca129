"""The generation endpoints: /v1/chat/completions, /v1/completions, and /v1/responses, which stores nothing."""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from onward import __version__
from onward.errors import OnwardError
from onward.language_model import Completion, Piece
from onward.protocols import (
    URLS,
    BodyReader,
    ChunkStream,
    ParsedBody,
    ResponseKey,
    ResponseStream,
    answer_body,
    error_fields,
    read_response,
    response_body,
)
from onward.protocols.chat_events import as_json
from onward.server.client import Client, check_headers, whole_body
from onward.server.errors import rendered
from onward.server.gate import CLIENT_CLOSED, access_of
from onward.server.models import ServedModel, Settings
from onward.server.resume import ResponseEvents, ResumeRequest
from onward.server.service import Service, parsed
from onward.server.sse import EventStream, OpenStreams
from onward.server.submission import ActiveRequest
from onward.tokenizer import Tokenizer

# Reads the fields of a body sent to a URL.
Read = Callable[[BodyReader, str, dict[str, Any], ResponseKey], ParsedBody]
MakeEvents = Callable[[ActiveRequest], ResponseEvents]
MakeBody = Callable[[ActiveRequest, Sequence[Completion]], dict[str, Any]]


def router(service: Service, streams: OpenStreams) -> APIRouter:
    routes = APIRouter()

    def add(url: str, read: Read, events: MakeEvents, make_body: MakeBody) -> None:
        def read_raw(raw: bytes, key: ResponseKey) -> tuple[ServedModel, ParsedBody]:
            fields = parsed(raw)
            served = service.models.find(fields.get("model"))
            return served, read(served.reader, url, fields, key)

        @routes.post(url.removeprefix("/v1"))
        async def generate(request: Request) -> Response:
            return await _respond(service, streams, request, read_raw, events, make_body)

    for url in URLS:
        add(url, BodyReader.read, _Chunks, _completion_body)
    add("/v1/responses", lambda reader, _, fields, key: read_response(reader, fields, key), _Events, _response_body)
    return routes


async def _respond(
    service: Service,
    streams: OpenStreams,
    request: Request,
    read: Callable[[bytes, ResponseKey], tuple[ServedModel, ParsedBody]],
    events: MakeEvents,
    make_body: MakeBody,
) -> Response:
    """Read a body, submit its requests, and respond with JSON or a stream."""
    resume = ResumeRequest.of(request.scope)
    raw = await read_logged(request, service.settings)
    client = Client(request.receive)
    try:
        subscriber = await service.submit(client, lambda key: read(raw, key), resume)
    except BaseException:
        client.close()
        raise

    active = subscriber.request

    def finish_request() -> None:
        client.close()
        service.finish(subscriber)
        access_of(request.scope).fields |= active.log_fields()

    if active.body.stream:
        try:
            return EventStream(subscriber, events(active), client, streams, finish_request)
        except BaseException:  # the stream will not call it
            finish_request()
            raise
    try:
        completions = await active.completions()
        content = await service.in_thread(lambda: rendered(make_body(active, completions)))
        return Response(content, media_type="application/json")
    except OnwardError:
        if client.disconnected:
            return Response(status_code=CLIENT_CLOSED)
        raise
    finally:
        finish_request()


async def read_logged(request: Request, settings: Settings) -> bytes:
    """Read a JSON body, and add it to the access log with --log-prompts. Raises `BodyError`."""
    check_headers(request.headers)
    raw = await whole_body(request, settings)
    if settings.log_prompts:
        access_of(request.scope).fields["body"] = raw.decode("utf-8", "replace")
    return raw


def _tokenizer(active: ActiveRequest) -> Tokenizer:
    tokenizer = active.served.engine.lm.tokenizer
    assert tokenizer is not None, "served models have one"
    return tokenizer


def _completion_body(active: ActiveRequest, completions: Sequence[Completion]) -> dict[str, Any]:
    return answer_body(active.body, completions, _tokenizer(active), __version__)


def _response_body(active: ActiveRequest, completions: Sequence[Completion]) -> dict[str, Any]:
    return response_body(active.body, completions[0], _tokenizer(active), __version__)


class _Chunks:
    """Chat and completion chunks as server-sent events."""

    per_piece = False

    def __init__(self, active: ActiveRequest) -> None:
        self._chunks = ChunkStream(active.body, _tokenizer(active), __version__)

    def begin(self, at: int) -> list[str]:
        return list(map(_event, self._chunks.begin(at)))

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        return [(count, _event(chunk)) for count, chunk in self._chunks.pieces(at, pieces)]

    def end(self, at: int, completion: Completion) -> list[str]:
        return list(map(_event, self._chunks.end(at, completion)))

    def finish(self) -> list[str]:
        return list(map(_event, [*self._chunks.usage(), "[DONE]"]))

    def error(self, error: OnwardError) -> list[str]:
        return [_event(as_json({"error": error_fields(error)}))]


def _event(chunk: str) -> str:
    return f"data: {chunk}\n\n"


class _Events:
    """The events of /v1/responses as server-sent events."""

    per_piece = True

    def __init__(self, active: ActiveRequest) -> None:
        self._stream = ResponseStream(active.body, _tokenizer(active), __version__)

    def begin(self, at: int) -> list[str]:
        return _named(self._stream.begin())

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        events = []
        for done, piece in enumerate(pieces):
            new = _named(self._stream.pieces([piece]))
            events += [(done + (event is new[-1]), event) for event in new]
        return events

    def end(self, at: int, completion: Completion) -> list[str]:
        return _named(self._stream.end(completion))

    def finish(self) -> list[str]:
        return []

    def error(self, error: OnwardError) -> list[str]:
        return _named(self._stream.error(error))


def _named(events: Sequence[dict[str, Any]]) -> list[str]:
    return [f"event: {event['type']}\ndata: {as_json(event)}\n\n" for event in events]
