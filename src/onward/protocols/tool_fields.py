"""The types of fields for tools."""

from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from onward.protocols.body import AtMost, JsonSchema, Values, expected

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
