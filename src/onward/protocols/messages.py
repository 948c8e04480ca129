"""The messages of chats in bodies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Required

from pydantic import ConfigDict, FailFast, Field, with_config
from typing_extensions import TypedDict

from onward.protocols.body import AtMost, FieldError, JsonSchema, Marker, Validation
from onward.util.text import brief


@dataclass(frozen=True)
class TextParts(Marker):
    """A string, or a list of text parts, which is joined to one. types: of the parts."""

    types: tuple[str, ...] = ("text",)

    def check(self, value: Any, validation: Validation, name: str) -> Any:
        return joined_text(value, validation, self.types)

    def describe(self, schema: JsonSchema) -> JsonSchema:
        part = {"type": {"enum": list(self.types)}, "text": {"type": "string"}}
        parts = {"type": "array", "items": {"type": "object", "properties": part, "required": [*part]}}
        return {"anyOf": [{"type": "string"}, parts, {"type": "null"}]}


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


# The text of a message; null is none.
Text = Annotated[str | None, TextParts()]


@dataclass(frozen=True)
class _Role(Marker):
    """A role of chat templates, in which the developer is the system."""

    def check(self, value: Any, validation: Validation, name: str) -> Any:
        return "system" if value == "developer" else value


@with_config(ConfigDict(extra="allow", strict=True))
class Message(TypedDict, total=False):
    """A message. Chat templates may read further keys."""

    role: Required[Annotated[str, _Role()]]
    content: Text
    name: str | None
    tool_calls: Annotated[list[Any] | None, AtMost("tools", "calls")]
    tool_call_id: str | None
    reasoning: str | None
    reasoning_content: str | None


Messages = Annotated[list[Message], Field(min_length=1), FailFast(), AtMost("messages", "messages")]


def template_form(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for the chat template, each with a content."""
    return [{**message, "content": message.get("content")} for message in messages]
