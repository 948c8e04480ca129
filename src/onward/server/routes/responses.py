"""/v1/responses, without a memory: nothing is stored, so nothing can be referred to."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from onward import __version__
from onward.completion import Completion, Piece
from onward.errors import OnwardError
from onward.openai import AnswerKey, Body, ResponseBody, ResponseStream, read_response, response_body
from onward.openai.stream import as_json
from onward.server.models import ServedModel
from onward.server.routes.answering import answer
from onward.server.routes.completions import tokenizer_of
from onward.server.service import Service, parsed
from onward.server.sse import Streams
from onward.server.submission import Submission


def router(service: Service, streams: Streams) -> APIRouter:
    routes = APIRouter()

    @routes.post("/responses")
    async def responses(request: Request) -> Response:
        return await answer(service, streams, request, partial(_read, service), _Events, _whole)

    return routes


def _read(service: Service, raw: bytes, key: AnswerKey) -> tuple[ServedModel, Body]:
    fields = parsed(raw)
    served = service.models.find(fields.get("model"))
    return served, read_response(served.reader, fields, key)


def _body(submission: Submission) -> ResponseBody:
    assert isinstance(submission.body, ResponseBody), "it was read here"
    return submission.body


def _whole(submission: Submission, completions: Sequence[Completion]) -> dict[str, Any]:
    return response_body(_body(submission), completions[0], tokenizer_of(submission), __version__)


class _Events:
    """The events of a response, each with its name."""

    singly = True

    def __init__(self, submission: Submission) -> None:
        self._stream = ResponseStream(_body(submission), tokenizer_of(submission), __version__)

    def begin(self, at: int) -> list[str]:
        return _written(self._stream.begin())

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        events = []
        for whole, piece in enumerate(pieces):
            told = _written(self._stream.pieces([piece]))
            events += [(whole + (event is told[-1]), event) for event in told]
        return events

    def end(self, at: int, completion: Completion) -> list[str]:
        return _written(self._stream.end(completion))

    def finish(self) -> list[str]:
        return []

    def error(self, error: OnwardError) -> list[str]:
        return _written(self._stream.error(error))


def _written(events: Sequence[dict[str, Any]]) -> list[str]:
    return [f"event: {event['type']}\ndata: {as_json(event)}\n\n" for event in events]
