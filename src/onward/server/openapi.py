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
_NULL: Schema = {"type": "null"}
_IDS: Schema = {"type": "array", "items": _COUNT, "minItems": 1}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _nullable(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, _NULL]}


def _fields(schema: Schema, *names: str) -> dict[str, Schema]:
    return dict.fromkeys(names, schema)


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: Any) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": [*required], **more}


def _strict(required: Mapping[str, Schema], optional: Mapping[str, Schema]) -> Schema:
    return _object(required, optional, additionalProperties=False)


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


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
    html = {"text/html": {"schema": _STRING}}
    return {
        "/v1/chat/completions": _generate("chat", "Generate a chat completion.", "ChatBody", "ChatCompletion"),
        "/v1/completions": _generate("complete", "Generate a completion.", "TextBody", "TextCompletion"),
        "/v1/responses": _generate("respond", "Generate a response; nothing is stored.", "ResponseBody", "Response"),
        "/v1/models": _get("models", "List the models.", _json(_ref("Models"))),
        "/v1/models/{name}": _get("model", "Get a model.", _json(_ref("Model")), 404) | {"parameters": [name]},
        "/v1/tokenize": _post("tokenize", "Tokenize a text or a conversation.", "TokenizeBody", "Tokens"),
        "/v1/detokenize": _post("detokenize", "Decode token ids to text.", "DetokenizeBody", "Detokenized"),
        "/health": _health("health", "Whether every engine is idle or making progress."),
        "/ready": _health("ready", "Whether the server accepts requests."),
        "/stats": _get("stats", "The current state of the engines.", _json(_OBJECT)),
        "/metrics": _get("metrics", "Prometheus metrics.", {"text/plain": {"schema": _STRING}}),
        "/": _operation("page", "The web page.", html, 403) | {"security": []},
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


def _generate(id: str, summary: str, body: str, response: str) -> dict[str, Any]:
    operation = _post(id, summary, body, response, 409, 422, 429)
    operation["parameters"] = [
        {"name": name, "in": "header", "required": False, "description": description, "schema": _STRING}
        for name, description in _HEADERS.items()
    ]
    event = _object({"data": _STRING}, {"event": _STRING})
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": event}
    return operation


def _post(id: str, summary: str, body: str, response: str, *errors: int) -> dict[str, Any]:
    operation = _get(id, summary, _json(_ref(response)), 400, 404, 408, 413, 415, 500, 503, *errors)
    return operation | {"requestBody": {"required": True, "content": _json(_ref(body))}}


def _get(id: str, summary: str, content: dict[str, Any], *errors: int) -> dict[str, Any]:
    return _operation(id, summary, content, 401, 403, *errors)


def _operation(id: str, summary: str, content: dict[str, Any], *errors: int) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    error = _json(_ref("Error"))
    responses |= {str(status): {"description": _ERRORS[status], "content": error} for status in errors}
    return {"operationId": id, "summary": summary, "responses": responses, "security": [{"key": []}]}


def _health(id: str, summary: str) -> dict[str, Any]:
    operation = _operation(id, summary, _json(_ref("Health")), 403)
    content = _json({"anyOf": [_ref("Health"), _ref("Error")]})
    operation["responses"]["503"] = {"description": "Not healthy or not ready.", "content": content}
    return operation | {"security": []}


def _schema_of(hint: Any) -> Schema:
    try:
        return TypeAdapter(hint).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError):  # a type without a JSON Schema; the reader checks it
        return {}


def _common() -> dict[str, Schema]:
    """The fields common to chats and completions."""
    hints = get_type_hints(GenerateOptionsDict)
    return {
        **{name: {"enum": [*values, None], "description": "not supported"} for name, values in NEUTRAL.items()},
        "model": _STRING,
        **_fields(_nullable(_COUNT), *LENGTHS),
        **{name: _schema_of(hints[name]) for name in field_options()},
        "logit_bias": _nullable({"type": "object", "additionalProperties": _NUMBER}),
        "json_schema": _nullable(_OBJECT, _BOOLEAN),
        "stream_options": _nullable(_strict({}, {"include_usage": _BOOLEAN})),
        **_fields(_nullable(_BOOLEAN), "stream", "return_token_ids"),
        **_fields({"description": "a label, without effect"}, *LABELS),
    }


_PART = _object({"type": {"const": "text"}, "text": _STRING})
_MESSAGE = _object(
    {"role": _STRING},
    {
        "content": _nullable(_STRING, _list(_PART)),
        "tool_calls": _nullable(_list(_OBJECT)),
        **_fields(_nullable(_STRING), "tool_call_id", "reasoning", "reasoning_content"),
    },
)
_MESSAGES = _list(_ref("Message"), minItems=1)
_TOOL_FIELDS = {
    "tools": _nullable(_list(_OBJECT)),
    "tool_choice": _nullable(_STRING, _OBJECT),
    "parallel_tool_calls": _nullable(_BOOLEAN),
    "top_logprobs": _nullable(_COUNT),
}


def _chat_body() -> Schema:
    fields = {
        **_TOOL_FIELDS,
        "logprobs": _nullable(_BOOLEAN),
        "response_format": _nullable(_object({"type": {"enum": ["text", "json_object", "json_schema"]}})),
        "prediction": _nullable(_object({"type": {"const": "content"}, "content": {"anyOf": [_STRING, _list(_PART)]}})),
        "reasoning_effort": _nullable(_STRING),
        "chat_template_kwargs": _nullable(_OBJECT),
    }
    return _strict({"messages": _MESSAGES}, {**_common(), **fields})


def _completion_body() -> Schema:
    prompt = {"anyOf": [_STRING, _IDS, _list({"anyOf": [_STRING, _IDS]}, minItems=1)]}
    fields = {"logprobs": _nullable(_COUNT), "echo": _nullable(_BOOLEAN), "best_of": _nullable(_COUNT)}
    return _strict({"prompt": prompt}, {**_common(), **fields})


def _response_body() -> Schema:
    fields = {
        **_TOOL_FIELDS,
        "model": _STRING,
        "instructions": _nullable(_STRING),
        "max_output_tokens": _nullable(_COUNT),
        **_fields(_nullable(_NUMBER), "temperature", "top_p"),
        "text": _nullable(_object({}, {"format": _object({"type": _STRING})})),
        "reasoning": _nullable(_object({}, {"effort": _nullable(_STRING)})),
        "stream": _nullable(_BOOLEAN),
        "store": {"enum": [False, None]},
        "include": _nullable(_list({"const": "message.output_text.logprobs"})),
    }
    return _object({"input": {"anyOf": [_STRING, _list(_OBJECT, minItems=1)]}}, fields)


def _schemas() -> dict[str, Schema]:
    usage = _object(_fields(_COUNT, "prompt_tokens", "completion_tokens", "total_tokens"))
    head = {**_fields(_STRING, "id", "model", "system_fingerprint"), "created": _INTEGER, "usage": usage}
    head |= {"seed": _nullable(_COUNT)}
    reasons = {"enum": ["stop", "length", "tool_calls"]}
    choice = {"index": _COUNT, "finish_reason": reasons, "logprobs": _nullable(_OBJECT)}
    message = _object({"role": {"const": "assistant"}, "content": _nullable(_STRING)}, {"tool_calls": _list(_OBJECT)})
    chat_choices = _list(_object({**choice, "message": message}))
    text_choices = _list(_object({**choice, "text": _STRING}))
    model = {**_fields(_STRING, "id", "owned_by"), "object": {"const": "model"}, "created": _INTEGER}
    response = {**_fields(_STRING, "id", "status", "model"), "object": {"const": "response"}, "output": _list(_OBJECT)}
    chat_options = {"add_generation_prompt": _BOOLEAN, "chat_template_kwargs": _OBJECT, "created": _COUNT}
    text_options = {"model": _STRING, "add_special_tokens": _BOOLEAN}
    max_len = {"max_model_len": _nullable(_COUNT)}
    error = {**_fields(_STRING, "message", "type"), **_fields(_nullable(_STRING), "param", "code")}
    return {
        "Message": _MESSAGE,
        "ChatBody": _chat_body(),
        "TextBody": _completion_body(),
        "ResponseBody": _response_body(),
        "TokenizeBody": {
            "anyOf": [
                _strict({"prompt": _STRING}, text_options),
                _strict({"messages": _MESSAGES}, {"model": _STRING, **chat_options}),
            ]
        },
        "DetokenizeBody": _strict({"tokens": _list(_COUNT)}, {"model": _STRING}),
        "ChatCompletion": _object({**head, "object": {"const": "chat.completion"}, "choices": chat_choices}),
        "TextCompletion": _object({**head, "object": {"const": "text_completion"}, "choices": text_choices}),
        "Response": _object(response),
        "Model": _object(model, max_len),
        "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
        "Tokens": _object({"tokens": _list(_COUNT), "count": _COUNT, **max_len}, {"created": _COUNT}),
        "Detokenized": _object({"prompt": _STRING}),
        "Health": _object({"status": _STRING, "models": _OBJECT, "version": _STRING}),
        "Error": _object({"error": _object(error)}),
    }
