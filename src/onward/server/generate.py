"""The endpoints that generate: /v1/chat/completions, /v1/completions and /v1/responses, which stores nothing."""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
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
from onward.server.client import Client, read_body
from onward.server.errors import rendered
from onward.server.gate import access_of
from onward.server.models import ServedModel, Settings
from onward.server.resume import AnswerEvents, ResumeRequest
from onward.server.service import Service, parsed
from onward.server.sse import EventStream, OpenStreams
from onward.server.submission import ActiveRequest
from onward.tokenizer import Tokenizer

# Reads the fields of a body that was sent to a URL.
Read = Callable[[BodyReader, str, dict[str, Any], ResponseKey], ParsedBody]
# Makes the events of a stream, and the whole answer.
MakeEvents = Callable[[ActiveRequest], AnswerEvents]
MakeAnswer = Callable[[ActiveRequest, Sequence[Completion]], dict[str, Any]]


def router(service: Service, streams: OpenStreams) -> APIRouter:
    routes = APIRouter()

    def add(url: str, read: Read, events: MakeEvents, whole: MakeAnswer) -> None:
        def read_raw(raw: bytes, key: ResponseKey) -> tuple[ServedModel, ParsedBody]:
            fields = parsed(raw)
            served = service.models.find(fields.get("model"))
            return served, read(served.reader, url, fields, key)

        @routes.post(url.removeprefix("/v1"))
        async def generate(request: Request) -> Response:
            return await _answer(service, streams, request, read_raw, events, whole)

    for url in URLS:
        add(url, BodyReader.read, _Chunks, _whole)
    add("/v1/responses", lambda reader, _, fields, key: read_response(reader, fields, key), _Events, _whole_response)
    return routes


async def _answer(
    service: Service,
    streams: OpenStreams,
    request: Request,
    read: Callable[[bytes, ResponseKey], tuple[ServedModel, ParsedBody]],
    events: MakeEvents,
    whole: MakeAnswer,
) -> Response:
    """Read a body, have its requests served, and answer: in one piece, or with a stream."""
    access = access_of(request.scope)
    handover = ResumeRequest.of(request.scope)
    try:
        raw = await read_logged(request, service.settings)
    except ClientDisconnect:
        return _nobody()
    client = Client(request.receive)
    try:
        recipient = await service.submit(client, lambda key: read(raw, key), handover)
    except BaseException:
        client.close()
        raise

    submission = recipient.submission

    def ended() -> None:
        client.close()
        service.ended(recipient)
        access.fields |= submission.facts()

    if submission.body.stream:
        try:
            return EventStream(recipient, events(submission), client, streams, ended)
        except BaseException:  # nobody would call it later
            ended()
            raise
    try:
        completions = await submission.completions()
        content = await service.in_thread(lambda: rendered(whole(submission, completions)))
        return Response(content, media_type="application/json")
    except OnwardError:
        if client.gone:
            return _nobody()
        raise
    finally:
        ended()


async def read_logged(request: Request, settings: Settings) -> bytes:
    """A request's body, which --log-prompts writes into the request's line of the log."""
    raw = await read_body(request, settings)
    if settings.log_prompts:
        access_of(request.scope).fields["body"] = raw.decode("utf-8", "replace")
    return raw


def _nobody() -> Response:
    """The answer to a client that has left. Only the log sees its status, which is nginx's."""
    return Response(status_code=499)


def _tokenizer(submission: ActiveRequest) -> Tokenizer:
    tokenizer = submission.served.engine.lm.tokenizer
    assert tokenizer is not None, "a served model has one"
    return tokenizer


def _whole(submission: ActiveRequest, completions: Sequence[Completion]) -> dict[str, Any]:
    return answer_body(submission.body, completions, _tokenizer(submission), __version__)


def _whole_response(submission: ActiveRequest, completions: Sequence[Completion]) -> dict[str, Any]:
    return response_body(submission.body, completions[0], _tokenizer(submission), __version__)


class _Chunks:
    """The chunks of an answer as events."""

    singly = False

    def __init__(self, submission: ActiveRequest) -> None:
        self._chunks = ChunkStream(submission.body, _tokenizer(submission), __version__)

    def begin(self, at: int) -> list[str]:
        return list(map(_event, self._chunks.begin(at)))

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        return [(told, _event(chunk)) for told, chunk in self._chunks.pieces(at, pieces)]

    def end(self, at: int, completion: Completion) -> list[str]:
        return list(map(_event, self._chunks.end(at, completion)))

    def finish(self) -> list[str]:
        return list(map(_event, [*self._chunks.usage(), "[DONE]"]))

    def error(self, error: OnwardError) -> list[str]:
        return [_event(as_json({"error": error_fields(error)}))]


def _event(chunk: str) -> str:
    return f"data: {chunk}\n\n"


class _Events:
    """The events of a response, each with its name."""

    singly = True

    def __init__(self, submission: ActiveRequest) -> None:
        self._stream = ResponseStream(submission.body, _tokenizer(submission), __version__)

    def begin(self, at: int) -> list[str]:
        return _named(self._stream.begin())

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        events = []
        for whole, piece in enumerate(pieces):
            told = _named(self._stream.pieces([piece]))
            events += [(whole + (event is told[-1]), event) for event in told]
        return events

    def end(self, at: int, completion: Completion) -> list[str]:
        return _named(self._stream.end(completion))

    def finish(self) -> list[str]:
        return []

    def error(self, error: OnwardError) -> list[str]:
        return _named(self._stream.error(error))


def _named(events: Sequence[dict[str, Any]]) -> list[str]:
    return [f"event: {event['type']}\ndata: {as_json(event)}\n\n" for event in events]
