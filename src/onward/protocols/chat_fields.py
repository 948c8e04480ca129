"""The fields of chats in bodies: messages and tools."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Required

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, WithJsonSchema, with_config
from typing_extensions import TypedDict

from onward.protocols.body import (
    AtMost,
    BodyError,
    FieldError,
    JsonSchema,
    Validation,
    Values,
    expected,
    validation_of,
)
from onward.util.text import brief


def joined_text(value: Any, validation: Validation, types: Sequence[str] = ("text",)) -> Any:
    """The text of a string or of text parts. Raises `FieldError` for any other value except null."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FieldError(f"must be a string or a list of text parts; got {brief(value)}", "invalid_type")
    if len(value) > validation.limits.parts:
        raise FieldError(f"has {len(value)} parts; this server allows at most {validation.limits.parts}")
    for at, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in types or not isinstance(part.get("text"), str):
            raise FieldError(f"must be a text part; got {brief(part)}", "unsupported_value", f"[{at}]")
    return "".join([part["text"] for part in value])


_PART: JsonSchema = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
# The text of a message; null is none.
Text = Annotated[
    str | None,
    BeforeValidator(lambda value, info: joined_text(value, validation_of(info))),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}),
]
# A role of chat templates, in which the developer is the system.
_Role = Annotated[str, BeforeValidator(lambda value: "system" if value == "developer" else value)]


@with_config(ConfigDict(extra="allow", strict=True))
class Message(TypedDict, total=False):
    """A message. Chat templates may read further keys."""

    role: Required[_Role]
    content: Text
    name: str | None
    tool_calls: Annotated[list[Any] | None, AtMost("tools", "calls")]
    tool_call_id: str | None
    reasoning: str | None
    reasoning_content: str | None


Messages = Annotated[list[Message], Field(min_length=1), FailFast(), AtMost("messages", "messages")]


def template_form(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for the chat template, each with a content. Calls and results of functions, in the form of older
    clients, become those of tools."""
    result: list[dict[str, Any]] = []
    last = ""  # the id of the last call of a function
    for at, fields in enumerate(messages):
        message = {**fields, "content": fields.get("content")}
        if message["role"] == "function":
            message |= {"role": "tool", "tool_call_id": last}
        elif (called := message.pop("function_call", None)) is not None:
            if not isinstance(called, dict) or not isinstance(called.get("name"), str):
                problem = f"must be {{'name': …, 'arguments': …}}; got {brief(called)}"
                raise BodyError(f"messages[{at}].function_call {problem}", "messages")
            last = f"{at:09}"  # some templates need 9 characters
            message["tool_calls"] = [{"id": last, "type": "function", "function": called}]
        result.append(message)
    return result


# The form of tools, for the document: `onward.chat.tools` validates them, as for Python.
_FUNCTION: JsonSchema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
    "required": ["name"],
    "additionalProperties": False,
}
_CUSTOM: JsonSchema = {
    "type": "object",
    "properties": {**_FUNCTION["properties"], "format": {"type": "object"}},
    "required": ["name"],
}
_TOOL: JsonSchema = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": kind}, kind: schema}, "required": ["type", kind]}
        for kind, schema in {"function": _FUNCTION, "custom": _CUSTOM}.items()
    ]
}
Tools = Annotated[
    list[Annotated[Any, WithJsonSchema(_TOOL)]] | None,
    Values("schema_values"),
    AtMost("tools", "tools"),
    expected("a list of tools", "invalid_value"),
]
_CHOICE: JsonSchema = {"anyOf": [{"enum": ["auto", "none", "required", None]}, {"type": "object"}]}
ToolChoice = Annotated[
    str | dict[str, Any] | None, expected("a string or an object", "invalid_value"), WithJsonSchema(_CHOICE)
]
Flag = Annotated[bool | None, expected("true or false", "invalid_value")]
# OpenAI's older fields.
Functions = Annotated[
    list[Annotated[Any, WithJsonSchema(_FUNCTION)]] | None,
    Values("schema_values"),
    AtMost("tools", "functions"),
    expected("a list of functions", "invalid_value"),
]
FunctionCall = Annotated[
    Literal["auto", "none"] | dict[str, Any] | None, expected("'auto', 'none' or {'name': …}", "invalid_value")
]
