"""The endpoints /tokenize and /detokenize."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from onward.protocols import BodyReader
from onward.protocols.tokenize import DetokenizeBody, Text, TokenizeBody, Tokens, detokenized, tokenized
from onward.server.documented import BodyRoute, errors
from onward.server.generate import read_logged
from onward.server.service import Service, parsed


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute)

    async def respond(request: Request, answer: Callable[[BodyReader, dict[str, Any]], dict[str, Any]]) -> Response:
        raw = await read_logged(request, service.settings)
        return await service.read(request, partial(_answer, service, answer), raw)

    @routes.post("/tokenize", response_model=Tokens, responses=errors(*_ERRORS), summary="Tokenize a text or a chat.")
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        return await respond(request, tokenized)

    @routes.post("/detokenize", response_model=Text, responses=errors(*_ERRORS), summary="Decode token ids to text.")
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        return await respond(request, detokenized)

    return routes


_ERRORS = (400, 404, 408, 413, 415, 422, 500, 503)


def _answer(
    service: Service, answer: Callable[[BodyReader, dict[str, Any]], dict[str, Any]], raw: bytes
) -> dict[str, Any]:
    fields = parsed(raw)
    return answer(service.models.find(fields.get("model")).reader, fields)
