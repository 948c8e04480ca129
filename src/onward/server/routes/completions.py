"""/v1/chat/completions and /v1/completions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from onward import __version__
from onward.checkpoint import Tokenizer
from onward.completion import Completion, Piece
from onward.errors import OnwardError
from onward.openai import AnswerKey, AnswerStream, Body, answer_body, error_fields
from onward.openai.stream import as_json
from onward.server.models import ServedModel
from onward.server.routes.answering import answer
from onward.server.service import Service, parsed
from onward.server.sse import Streams
from onward.server.submission import Submission


def router(service: Service, streams: Streams) -> APIRouter:
    routes = APIRouter()

    async def complete(url: str, request: Request) -> Response:
        return await answer(service, streams, request, partial(_read, service, url), _Chunks, _whole)

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await complete("/v1/chat/completions", request)

    @routes.post("/completions")
    async def completions(request: Request) -> Response:
        return await complete("/v1/completions", request)

    return routes


def tokenizer_of(submission: Submission) -> Tokenizer:
    tokenizer = submission.served.engine.lm.tokenizer
    assert tokenizer is not None, "a served model has one"
    return tokenizer


def _read(service: Service, url: str, raw: bytes, key: AnswerKey) -> tuple[ServedModel, Body]:
    fields = parsed(raw)
    served = service.models.find(fields.get("model"))
    return served, served.reader.read(url, fields, key)


def _whole(submission: Submission, completions: Sequence[Completion]) -> dict[str, Any]:
    return answer_body(submission.body, completions, tokenizer_of(submission), __version__)


class _Chunks:
    """The chunks of an answer as events."""

    singly = False

    def __init__(self, submission: Submission) -> None:
        self._chunks = AnswerStream(submission.body, tokenizer_of(submission), __version__)

    def begin(self, at: int) -> list[str]:
        return _events(self._chunks.begin(at))

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        return [(told, _event(chunk)) for told, chunk in self._chunks.pieces(at, pieces)]

    def end(self, at: int, completion: Completion) -> list[str]:
        return _events(self._chunks.end(at, completion))

    def finish(self) -> list[str]:
        return _events([*self._chunks.usage(), "[DONE]"])

    def error(self, error: OnwardError) -> list[str]:
        return _events([as_json({"error": error_fields(error)})])


def _events(chunks: Sequence[str]) -> list[str]:
    return list(map(_event, chunks))


def _event(chunk: str) -> str:
    return f"data: {chunk}\n\n"
