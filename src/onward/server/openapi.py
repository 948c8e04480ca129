"""The document of the endpoints at /openapi.json: paths, bodies and answers.

The fields of bodies come from where they are read: the options of `generate` with their types, and the reader's own.
"""

import functools
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from onward import __version__
from onward.language_model import GenerateOptionsDict
from onward.protocols.schema import LABELS, LENGTHS, NEUTRAL, field_options

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_IDS: Schema = {"type": "array", "items": _COUNT, "minItems": 1}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: Any) -> Schema:
    fields = {**required, **(optional or {})}
    return {"type": "object", "properties": fields, "required": [*required], **more}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def document() -> dict[str, Any]:
    """The OpenAPI document of a server."""
    paths: dict[str, Any] = {}
    for path, operation in _operations().items():
        method = "post" if "requestBody" in operation else "get"
        paths[path] = {method: operation}
        if path.startswith("/v1/"):
            plain = f"{operation['operationId']}_plain"
            paths[path.removeprefix("/v1")] = {method: {**operation, "operationId": plain}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Onward", "version": __version__, "description": "OpenAI's protocol over Onward's engines."},
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operations() -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    return {
        "/v1/chat/completions": _generating("chat", "Answer a conversation.", "ChatBody", "ChatCompletion"),
        "/v1/completions": _generating("complete", "Go on with a text.", "TextBody", "TextCompletion"),
        "/v1/responses": _generating("respond", "Answer an input; nothing is stored.", "ResponseBody", "Response"),
        "/v1/models": _operation("models", "What is served.", _ref("Models"), (401, 403)),
        "/v1/models/{name}": _operation("model", "One of the models.", _ref("Model"), (401, 403, 404))
        | {"parameters": [name]},
        "/v1/tokenize": _posting("tokenize", "The ids of a text or a conversation.", "TokenizeBody", "Tokens"),
        "/v1/detokenize": _posting("detokenize", "The text of ids.", "DetokenizeBody", "Detokenized"),
        "/health": _state("health", "Whether every engine advances, or has nothing to do."),
        "/ready": _state("ready", "Whether requests are taken."),
        "/stats": _operation("stats", "What the engines do now.", _OBJECT, (401, 403)),
        "/metrics": _operation("metrics", "For Prometheus.", _TEXT, (401, 403), "text/plain"),
        "/": _operation("page", "A page for people.", _TEXT, (403,), "text/html") | {"security": []},
    }


_ERRORS = {
    400: "What is wrong with the request.",
    401: "No API key, or a wrong one.",
    403: "A name that the server does not answer to.",
    404: "There is no such model.",
    408: "The body did not arrive.",
    409: "The stream was begun by an engine whose texts would go on otherwise.",
    413: "The body is too large.",
    415: "The body is no JSON by its own account.",
    422: "Last-Event-ID or Idempotency-Key came with another body.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "Something is wrong with the server.",
    503: "The server takes no requests; Retry-After says when to come back.",
}
_HEADERS = {
    "Last-Event-ID": "The id of a stream's event: the same body is answered with the events after it.",
    "Idempotency-Key": "The same body with the same key gets the same answer.",
}
_OF_BODIES = (400, 401, 403, 404, 408, 413, 415, 500, 503)


def _generating(id: str, summary: str, body: str, answer: str) -> dict[str, Any]:
    operation = _posting(id, summary, body, answer)
    operation["responses"] |= {str(status): _error(status) for status in (409, 422, 429)}
    operation["parameters"] = [
        {"name": name, "in": "header", "required": False, "description": about, "schema": _TEXT}
        for name, about in _HEADERS.items()
    ]
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    return operation


def _posting(id: str, summary: str, body: str, answer: str) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(body)}}
    operation = _operation(id, summary, _ref(answer), _OF_BODIES)
    return operation | {"requestBody": {"required": True, "content": content}}


def _operation(
    id: str, summary: str, answer: Schema, errors: tuple[int, ...], kind: str = "application/json"
) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": {kind: {"schema": answer}}}}
    responses |= {str(status): _error(status) for status in errors}
    return {"operationId": id, "summary": summary, "responses": responses, "security": [{"key": []}]}


def _error(status: int) -> dict[str, Any]:
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": _ref("Error")}}}


def _state(id: str, summary: str) -> dict[str, Any]:
    operation = _operation(id, summary, _ref("Health"), (403,))
    either = {"anyOf": [_ref("Health"), _ref("Error")]}
    operation["responses"]["503"] = {"description": "No.", "content": {"application/json": {"schema": either}}}
    return operation | {"security": []}


# One event of a stream.
_EVENT = _object({"data": _TEXT}, {"event": _TEXT})

# ── bodies ────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _options() -> dict[str, Schema]:
    """The options of `generate` that a body may have."""
    hints = get_type_hints(GenerateOptionsDict)
    return {name: _schema_of(hints[name]) for name in field_options()}


def _schema_of(hint: Any) -> Schema:
    try:
        return TypeAdapter(hint).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError):  # a type that JSON has no word for; the reader checks it
        return {}


def _common() -> dict[str, Schema]:
    """The fields that chats and completions share."""
    neutral = {name: {"enum": [*served, None], "description": "not served"} for name, served in NEUTRAL.items()}
    own = {
        "model": _TEXT,
        **dict.fromkeys(LENGTHS, _maybe(_COUNT)),
        **_options(),
        "logit_bias": _maybe({"type": "object", "additionalProperties": _NUMBER}),
        "json_schema": {"anyOf": [_OBJECT, _BOOLEAN, {"type": "null"}]},
        "stream": _maybe(_BOOLEAN),
        "stream_options": _maybe(_object({}, {"include_usage": _BOOLEAN}, additionalProperties=False)),
        "return_token_ids": _maybe(_BOOLEAN),
        **{name: {"description": "a label, which changes nothing"} for name in LABELS},
    }
    return {**neutral, **own}


_PART = _object({"type": {"const": "text"}, "text": _TEXT})
_MESSAGE = _object(
    {"role": _TEXT},
    {
        "content": {"anyOf": [_TEXT, _list(_PART), {"type": "null"}]},
        "tool_calls": _maybe(_list(_OBJECT)),
        "tool_call_id": _maybe(_TEXT),
        "reasoning": _maybe(_TEXT),
        "reasoning_content": _maybe(_TEXT),
    },
)
_MESSAGES = _list(_ref("Message"), minItems=1)


def _chat_body() -> Schema:
    own = {
        "logprobs": _maybe(_BOOLEAN),
        "top_logprobs": _maybe(_COUNT),
        "tools": _maybe(_list(_OBJECT)),
        "tool_choice": {"anyOf": [_TEXT, _OBJECT, {"type": "null"}]},
        "parallel_tool_calls": _maybe(_BOOLEAN),
        "response_format": _maybe(_object({"type": {"enum": ["text", "json_object", "json_schema"]}})),
        "prediction": _maybe(_object({"type": {"const": "content"}, "content": {"anyOf": [_TEXT, _list(_PART)]}})),
        "reasoning_effort": _maybe(_TEXT),
        "chat_template_kwargs": _maybe(_OBJECT),
    }
    return _object({"messages": _MESSAGES}, {**_common(), **own}, additionalProperties=False)


def _text_body() -> Schema:
    prompt = {"anyOf": [_TEXT, _IDS, _list({"anyOf": [_TEXT, _IDS]}, minItems=1)]}
    own = {"logprobs": _maybe(_COUNT), "echo": _maybe(_BOOLEAN), "best_of": _maybe(_COUNT)}
    return _object({"prompt": prompt}, {**_common(), **own}, additionalProperties=False)


def _response_body() -> Schema:
    own = {
        "model": _TEXT,
        "instructions": _maybe(_TEXT),
        "max_output_tokens": _maybe(_COUNT),
        "temperature": _maybe(_NUMBER),
        "top_p": _maybe(_NUMBER),
        "tools": _maybe(_list(_OBJECT)),
        "tool_choice": {"anyOf": [_TEXT, _OBJECT, {"type": "null"}]},
        "parallel_tool_calls": _maybe(_BOOLEAN),
        "text": _maybe(_object({}, {"format": _object({"type": _TEXT})})),
        "reasoning": _maybe(_object({}, {"effort": _maybe(_TEXT)})),
        "stream": _maybe(_BOOLEAN),
        "store": {"enum": [False, None]},
        "include": _maybe(_list({"const": "message.output_text.logprobs"})),
        "top_logprobs": _maybe(_COUNT),
    }
    return _object({"input": {"anyOf": [_TEXT, _list(_OBJECT, minItems=1)]}}, own)


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _schemas() -> dict[str, Schema]:
    usage = _object(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT))
    head = {"id": _TEXT, "created": _WHOLE, "model": _TEXT, "usage": usage, "system_fingerprint": _TEXT}
    head |= {"seed": _maybe(_COUNT)}
    ended = {"index": _COUNT, "finish_reason": {"enum": ["stop", "length", "tool_calls"]}, "logprobs": _maybe(_OBJECT)}
    said = _object({"role": {"const": "assistant"}, "content": _maybe(_TEXT)}, {"tool_calls": _list(_OBJECT)})
    chat_choices = _list(_object({**ended, "message": said}))
    text_choices = _list(_object({**ended, "text": _TEXT}))
    error = {"message": _TEXT, "type": _TEXT, "param": _maybe(_TEXT), "code": _maybe(_TEXT)}
    model = {"id": _TEXT, "object": {"const": "model"}, "created": _WHOLE, "owned_by": _TEXT}
    response = {"id": _TEXT, "object": {"const": "response"}, "status": _TEXT, "output": _list(_OBJECT), "model": _TEXT}
    of_chat = {"model": _TEXT, "add_generation_prompt": _BOOLEAN, "chat_template_kwargs": _OBJECT, "created": _COUNT}
    of_text = {"model": _TEXT, "add_special_tokens": _BOOLEAN}
    return {
        "Message": _MESSAGE,
        "ChatBody": _chat_body(),
        "TextBody": _text_body(),
        "ResponseBody": _response_body(),
        "TokenizeBody": {
            "anyOf": [
                _object({"prompt": _TEXT}, of_text, additionalProperties=False),
                _object({"messages": _MESSAGES}, of_chat, additionalProperties=False),
            ]
        },
        "DetokenizeBody": _object({"tokens": _list(_COUNT)}, {"model": _TEXT}, additionalProperties=False),
        "ChatCompletion": _object({**head, "object": {"const": "chat.completion"}, "choices": chat_choices}),
        "TextCompletion": _object({**head, "object": {"const": "text_completion"}, "choices": text_choices}),
        "Response": _object(response),
        "Model": _object(model, {"max_model_len": _maybe(_COUNT)}),
        "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
        "Tokens": _object(
            {"tokens": _list(_COUNT), "count": _COUNT, "max_model_len": _maybe(_COUNT)}, {"created": _COUNT}
        ),
        "Detokenized": _object({"prompt": _TEXT}),
        "Health": _object({"status": _TEXT, "models": _OBJECT, "version": _TEXT}),
        "Error": _object({"error": _object(error)}),
    }
