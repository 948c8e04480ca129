"""/tokenize and /detokenize: convert between text and token ids."""

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from onward.errors import OnwardError, RequestError, TokenizerError
from onward.language_model.request import checked_ids
from onward.protocols import BodyError, ResponseKey
from onward.protocols.answer_key import LAST_SECOND
from onward.protocols.schema import read_messages, read_template_variables
from onward.server.errors import CompactJSONResponse
from onward.server.generate import read_logged
from onward.server.service import Service, parsed

_PROMPT_FIELDS = ("prompt", "add_special_tokens")
_CHAT_FIELDS = ("messages", "add_generation_prompt", "chat_template_kwargs", "created")


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        raw = await read_logged(request, service.settings)
        return CompactJSONResponse(await service.in_thread(partial(_tokenized, service), raw))

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        raw = await read_logged(request, service.settings)
        return CompactJSONResponse(await service.in_thread(partial(_detokenized, service), raw))

    return routes


def _tokenized(service: Service, raw: bytes) -> dict[str, Any]:
    fields = _fields(raw, (*_PROMPT_FIELDS, *_CHAT_FIELDS))
    served = service.models.find(fields.get("model"))
    lm = served.engine.lm
    if ("prompt" in fields) == ("messages" in fields):
        raise BodyError("give either prompt or messages", "prompt")
    names = _CHAT_FIELDS if "messages" in fields else _PROMPT_FIELDS
    for name in set(fields) - {*names, "model"}:
        raise BodyError(f"{name} cannot be combined with {names[0]}: remove it", name)
    extra = {"created": _created(fields)} if "messages" in fields else {}
    try:
        if extra:
            variables = {**served.reader.variables, **read_template_variables(lm, fields)}
            variables["add_generation_prompt"] = _boolean(fields, "add_generation_prompt")
            now = ResponseKey.new(extra["created"]).time
            tokens = lm.chat_prompt(read_messages(fields["messages"]), variables, now)
        else:
            if not isinstance(fields["prompt"], str):
                raise BodyError(f"prompt must be a string; got {fields['prompt']!r}", "prompt", "invalid_type")
            tokens = lm.encode(fields["prompt"], add_special_tokens=_boolean(fields, "add_special_tokens"))
    except BodyError:
        raise
    except (RequestError, TokenizerError) as error:
        raise BodyError(str(error), names[0]) from error
    return {"tokens": tokens, "count": len(tokens), "max_model_len": served.max_model_len, **extra}


def _created(fields: dict[str, Any]) -> int:
    """The time for the chat template, in seconds since 1970; by default the current time."""
    created = fields.get("created", int(time.time()))
    if isinstance(created, bool) or not isinstance(created, int) or not 0 <= created <= LAST_SECOND:
        message = f"created must be an integer, in seconds since 1970; got {created!r}"
        raise BodyError(message, "created", "invalid_type")
    return created


def _detokenized(service: Service, raw: bytes) -> dict[str, Any]:
    fields = _fields(raw, ("tokens",))
    served = service.models.find(fields.get("model"))
    lm, tokens = served.engine.lm, fields.get("tokens")
    if not isinstance(tokens, list):
        raise BodyError(f"tokens must be a list of ids; got {tokens!r}", "tokens", "invalid_type")
    try:
        return {"prompt": lm.decode(checked_ids(tokens, lm.model.vocab_size)) if tokens else ""}
    except OnwardError as error:
        raise BodyError(str(error), "tokens") from error


def _fields(raw: bytes, known: tuple[str, ...]) -> dict[str, Any]:
    fields = {name: value for name, value in parsed(raw).items() if value is not None}
    for name in fields:
        if name not in (*known, "model"):
            raise BodyError(f"unknown field {name!r}; use model, {', '.join(known)}", name, "unknown_parameter")
    return fields


def _boolean(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name, True)
    if not isinstance(value, bool):
        raise BodyError(f"{name} must be true or false; got {value!r}", name, "invalid_type")
    return value
