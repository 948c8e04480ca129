"""The OpenAPI document at /openapi.json.

The schemas of bodies are built from the `generate` options' types and the body reader's own fields.
"""

from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from onward import __version__
from onward.language_model import GenerateOptionsDict
from onward.protocols.schema import LABELS, LENGTHS, NEUTRAL, field_options

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_IDS: Schema = {"type": "array", "items": _COUNT, "minItems": 1}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: Any) -> Schema:
    fields = {**required, **(optional or {})}
    return {"type": "object", "properties": fields, "required": [*required], **more}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def document() -> dict[str, Any]:
    """Return the OpenAPI document of a server."""
    paths: dict[str, Any] = {}
    for path, operation in _operations().items():
        method = "post" if "requestBody" in operation else "get"
        paths[path] = {method: operation}
        if path.startswith("/v1/"):
            paths[path.removeprefix("/v1")] = {method: operation | {"operationId": f"{operation['operationId']}_plain"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Onward", "version": __version__, "description": "OpenAI's API, served by Onward engines."},
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operations() -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": _STRING}
    return {
        "/v1/chat/completions": _generate_operation(
            "chat", "Generate a chat completion.", "ChatBody", "ChatCompletion"
        ),
        "/v1/completions": _generate_operation("complete", "Generate a completion.", "TextBody", "TextCompletion"),
        "/v1/responses": _generate_operation(
            "respond", "Generate a response; nothing is stored.", "ResponseBody", "Response"
        ),
        "/v1/models": _operation("models", "List the models.", _ref("Models"), (401, 403)),
        "/v1/models/{name}": _operation("model", "Get a model.", _ref("Model"), (401, 403, 404))
        | {"parameters": [name]},
        "/v1/tokenize": _post_operation("tokenize", "Tokenize a text or a conversation.", "TokenizeBody", "Tokens"),
        "/v1/detokenize": _post_operation("detokenize", "Decode token ids to text.", "DetokenizeBody", "Detokenized"),
        "/health": _health_operation("health", "Whether every engine is idle or making progress."),
        "/ready": _health_operation("ready", "Whether the server accepts requests."),
        "/stats": _operation("stats", "The current state of the engines.", _OBJECT, (401, 403)),
        "/metrics": _operation("metrics", "Prometheus metrics.", _STRING, (401, 403), "text/plain"),
        "/": _operation("page", "The web page.", _STRING, (403,), "text/html") | {"security": []},
    }


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
    500: "Internal server error.",
    503: "The server takes no requests; Retry-After says when to retry.",
}
_HEADERS = {
    "Last-Event-ID": "The id of a stream's event. The same body is answered with the events after it.",
    "Idempotency-Key": "The same body with the same key gets the same answer.",
}
_BODY_ERRORS = (400, 401, 403, 404, 408, 413, 415, 500, 503)


def _generate_operation(id: str, summary: str, body: str, response: str) -> dict[str, Any]:
    operation = _post_operation(id, summary, body, response)
    operation["responses"] |= {str(status): _error(status) for status in (409, 422, 429)}
    operation["parameters"] = [
        {"name": name, "in": "header", "required": False, "description": about, "schema": _STRING}
        for name, about in _HEADERS.items()
    ]
    operation["responses"]["200"]["content"]["text/event-stream"] = {
        "schema": _object({"data": _STRING}, {"event": _STRING})
    }
    return operation


def _post_operation(id: str, summary: str, body: str, response: str) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(body)}}
    request = {"requestBody": {"required": True, "content": content}}
    return _operation(id, summary, _ref(response), _BODY_ERRORS) | request


def _operation(
    id: str, summary: str, response: Schema, errors: tuple[int, ...], kind: str = "application/json"
) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "OK", "content": {kind: {"schema": response}}}}
    responses |= {str(status): _error(status) for status in errors}
    return {"operationId": id, "summary": summary, "responses": responses, "security": [{"key": []}]}


def _error(status: int) -> dict[str, Any]:
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": _ref("Error")}}}


def _health_operation(id: str, summary: str) -> dict[str, Any]:
    operation = _operation(id, summary, _ref("Health"), (403,))
    either = {"anyOf": [_ref("Health"), _ref("Error")]}
    operation["responses"]["503"] = {
        "description": "Not healthy or not ready.",
        "content": {"application/json": {"schema": either}},
    }
    return operation | {"security": []}


# ── bodies ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _schema_of(hint: Any) -> Schema:
    try:
        return TypeAdapter(hint).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError):  # a type without a JSON Schema; the reader checks it
        return {}


def _common() -> dict[str, Schema]:
    """The fields common to chats and completions."""
    hints = get_type_hints(GenerateOptionsDict)
    neutral = {name: {"enum": [*served, None], "description": "not supported"} for name, served in NEUTRAL.items()}
    return {
        **neutral,
        "model": _STRING,
        **dict.fromkeys(LENGTHS, _nullable(_COUNT)),
        **{name: _schema_of(hints[name]) for name in field_options()},
        "logit_bias": _nullable({"type": "object", "additionalProperties": _NUMBER}),
        "json_schema": {"anyOf": [_OBJECT, _BOOLEAN, {"type": "null"}]},
        "stream": _nullable(_BOOLEAN),
        "stream_options": _nullable(_object({}, {"include_usage": _BOOLEAN}, additionalProperties=False)),
        "return_token_ids": _nullable(_BOOLEAN),
        **{name: {"description": "a label, without effect"} for name in LABELS},
    }


_PART = _object({"type": {"const": "text"}, "text": _STRING})
_MESSAGE = _object(
    {"role": _STRING},
    {
        "content": {"anyOf": [_STRING, _list(_PART), {"type": "null"}]},
        "tool_calls": _nullable(_list(_OBJECT)),
        "tool_call_id": _nullable(_STRING),
        "reasoning": _nullable(_STRING),
        "reasoning_content": _nullable(_STRING),
    },
)
_MESSAGES = _list(_ref("Message"), minItems=1)


def _chat_body() -> Schema:
    own = {
        "logprobs": _nullable(_BOOLEAN),
        "top_logprobs": _nullable(_COUNT),
        "tools": _nullable(_list(_OBJECT)),
        "tool_choice": {"anyOf": [_STRING, _OBJECT, {"type": "null"}]},
        "parallel_tool_calls": _nullable(_BOOLEAN),
        "response_format": _nullable(_object({"type": {"enum": ["text", "json_object", "json_schema"]}})),
        "prediction": _nullable(_object({"type": {"const": "content"}, "content": {"anyOf": [_STRING, _list(_PART)]}})),
        "reasoning_effort": _nullable(_STRING),
        "chat_template_kwargs": _nullable(_OBJECT),
    }
    return _object({"messages": _MESSAGES}, {**_common(), **own}, additionalProperties=False)


def _completion_body() -> Schema:
    prompt = {"anyOf": [_STRING, _IDS, _list({"anyOf": [_STRING, _IDS]}, minItems=1)]}
    own = {"logprobs": _nullable(_COUNT), "echo": _nullable(_BOOLEAN), "best_of": _nullable(_COUNT)}
    return _object({"prompt": prompt}, {**_common(), **own}, additionalProperties=False)


def _response_body() -> Schema:
    own = {
        "model": _STRING,
        "instructions": _nullable(_STRING),
        "max_output_tokens": _nullable(_COUNT),
        "temperature": _nullable(_NUMBER),
        "top_p": _nullable(_NUMBER),
        "tools": _nullable(_list(_OBJECT)),
        "tool_choice": {"anyOf": [_STRING, _OBJECT, {"type": "null"}]},
        "parallel_tool_calls": _nullable(_BOOLEAN),
        "text": _nullable(_object({}, {"format": _object({"type": _STRING})})),
        "reasoning": _nullable(_object({}, {"effort": _nullable(_STRING)})),
        "stream": _nullable(_BOOLEAN),
        "store": {"enum": [False, None]},
        "include": _nullable(_list({"const": "message.output_text.logprobs"})),
        "top_logprobs": _nullable(_COUNT),
    }
    return _object({"input": {"anyOf": [_STRING, _list(_OBJECT, minItems=1)]}}, own)


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _schemas() -> dict[str, Schema]:
    usage = _object(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT))
    head = {"id": _STRING, "created": _INTEGER, "model": _STRING, "usage": usage, "system_fingerprint": _STRING}
    head |= {"seed": _nullable(_COUNT)}
    choice = {
        "index": _COUNT,
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        "logprobs": _nullable(_OBJECT),
    }
    message = _object({"role": {"const": "assistant"}, "content": _nullable(_STRING)}, {"tool_calls": _list(_OBJECT)})
    chat_choices = _list(_object({**choice, "message": message}))
    text_choices = _list(_object({**choice, "text": _STRING}))
    error = {"message": _STRING, "type": _STRING, "param": _nullable(_STRING), "code": _nullable(_STRING)}
    model = {"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _STRING}
    response = {
        "id": _STRING,
        "object": {"const": "response"},
        "status": _STRING,
        "output": _list(_OBJECT),
        "model": _STRING,
    }
    chat_options = {
        "model": _STRING,
        "add_generation_prompt": _BOOLEAN,
        "chat_template_kwargs": _OBJECT,
        "created": _COUNT,
    }
    text_options = {"model": _STRING, "add_special_tokens": _BOOLEAN}
    return {
        "Message": _MESSAGE,
        "ChatBody": _chat_body(),
        "TextBody": _completion_body(),
        "ResponseBody": _response_body(),
        "TokenizeBody": {
            "anyOf": [
                _object({"prompt": _STRING}, text_options, additionalProperties=False),
                _object({"messages": _MESSAGES}, chat_options, additionalProperties=False),
            ]
        },
        "DetokenizeBody": _object({"tokens": _list(_COUNT)}, {"model": _STRING}, additionalProperties=False),
        "ChatCompletion": _object({**head, "object": {"const": "chat.completion"}, "choices": chat_choices}),
        "TextCompletion": _object({**head, "object": {"const": "text_completion"}, "choices": text_choices}),
        "Response": _object(response),
        "Model": _object(model, {"max_model_len": _nullable(_COUNT)}),
        "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
        "Tokens": _object(
            {"tokens": _list(_COUNT), "count": _COUNT, "max_model_len": _nullable(_COUNT)}, {"created": _COUNT}
        ),
        "Detokenized": _object({"prompt": _STRING}),
        "Health": _object({"status": _STRING, "models": _OBJECT, "version": _STRING}),
        "Error": _object({"error": _object(error)}),
    }
