"""/v1/responses: OpenAI's responses, which are read as the equivalent chats."""

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator

from onward.errors import ContextOverflowError, OnwardError
from onward.language_model import Completion, Request
from onward.protocols.body import (
    Body,
    FieldError,
    JsonSchema,
    Label,
    Unserved,
    Validation,
    Values,
    Whole,
    error_fields,
    expected,
    validation_of,
)
from onward.protocols.chat import FormatType, ToolBody
from onward.protocols.chat_fields import ToolChoice, Tools
from onward.protocols.options import OF_TEXTS, LabeledBody, Length, body_with_options
from onward.protocols.protocol import Item, ModelContext, ParsedBody, Prompts, Protocol, Storage
from onward.protocols.response_items import (
    HOSTED_TOOLS,
    NEEDS_STORE,
    SEARCH_TOOLS,
    Metadata,
    full_name,
    messages_of,
    resolved,
)
from onward.protocols.responses_events import ENCRYPTED, Response, ResponseEventStream
from onward.util.text import brief

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, ENCRYPTED)


class TextFormat(Body):
    type: FormatType
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Values("schema_values", "schema_depth")] = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") is (self.schema_ is None):
            raise FieldError('must be {"type": "json_schema", "name": …, "schema": {…}}', "invalid_type")
        return self


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, expected("low, medium or high", "invalid_value")] = (
        Field(None, description="For chat templates that read the variable `verbosity`; no effect on others.")
    )


# The reasoning is returned whole, so a summary of any length is none: it changes nothing.
Summary = Annotated[
    Literal["auto", "concise", "detailed"] | None, expected("auto, concise or detailed", "invalid_value")
]


class Reasoning(Body):
    effort: str | None = None
    summary: Summary = None
    generate_summary: Summary = None


def _include(value: Any) -> Any:
    if value is not None and (not isinstance(value, list) or any(each not in _INCLUDABLE for each in value)):
        raise FieldError(f"supports only {list(_INCLUDABLE)}; got {brief(value)}")
    return value


def _nested_tools(value: Any, info: ValidationInfo) -> list[Any]:
    """Tools of chats from those of responses, which are not nested. A namespace's tools have its name before theirs.
    A search on OpenAI's servers is ignored, and so are, as unsupported hints, other tools that they run."""
    if not isinstance(value, list):
        raise FieldError(f"must be a list; got {brief(value)}", "invalid_type")
    tools, validation = [], validation_of(info)
    for at, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in SEARCH_TOOLS or (kind in HOSTED_TOOLS and validation.ignore_unsupported):
            validation.ignored.append(f"tools[{at}]")
        elif kind == "namespace":
            name, inner = tool.get("name"), tool.get("tools")
            if not isinstance(name, str) or not isinstance(inner, list):
                raise FieldError(f"must have a name and tools; got {brief(tool)}", "invalid_type", f"[{at}]")
            tools += [_nested_tool(each, f"[{at}].tools[{of}]", name) for of, each in enumerate(inner)]
        else:
            tools.append(_nested_tool(tool, f"[{at}]"))
    return tools


def _nested_tool(tool: Any, at: str, namespace: str | None = None) -> dict[str, Any]:
    if not isinstance(tool, dict) or (kind := tool.get("type")) not in ("function", "custom"):
        raise FieldError(f"must be a function or a custom tool; got {brief(tool)}", "unsupported_value", at)
    nested = {name: value for name, value in tool.items() if name != "type" and value is not None}
    if isinstance(nested.get("name"), str):
        nested["name"] = full_name(nested["name"], namespace)
    format = nested.get("format")
    if kind == "custom" and isinstance(format, dict) and format.get("type") == "grammar":
        grammar = {name: value for name, value in format.items() if name != "type"}
        nested["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: nested}


def _nested_choice(value: Any) -> Any:
    """A choice of chats from one of responses, which is not nested."""
    if not isinstance(value, dict):
        return value
    if (kind := value.get("type")) == "allowed_tools":
        allowed = {name: each for name, each in value.items() if name != "type"}
        if isinstance(tools := allowed.get("tools"), list):
            allowed["tools"] = [_nested_choice(tool) for tool in tools]
        return {"type": kind, kind: allowed}
    return (
        {"type": kind, kind: {"name": value["name"]}} if kind in ("function", "custom") and "name" in value else value
    )


def _items(value: Any, info: ValidationInfo) -> list[Item]:
    """A text, or items, as items."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise FieldError(f"must be a string or a list of items; got {brief(value)}", "invalid_type")
    limit = validation_of(info).limits.messages
    if len(value) > limit:
        raise FieldError(f"has {len(value)} items; this server allows at most {limit}")
    for at, item in enumerate(value):
        if not isinstance(item, dict):
            raise FieldError(f"must be an object; got {brief(item)}", "invalid_type", f"[{at}]")
    return value


@dataclass(frozen=True)
class NeedsStore(Unserved):
    """A field that needs a server with a response store."""

    def check(self, value: Any, validation: Validation, name: str) -> Any:
        if validation.stores or value is False:
            return value
        if self.hint and validation.ignore_unsupported:
            return super().check(value, validation, name)
        raise FieldError(NEEDS_STORE, "unsupported_value")

    def describe(self, schema: JsonSchema) -> JsonSchema:
        return schema


_ITEMS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}


class ResponseStreamOptions(Body):
    include_obfuscation: Annotated[Any, Unserved((False,), hint=True)] = None


if TYPE_CHECKING:
    _WithOptions = LabeledBody
else:
    _WithOptions = body_with_options("_WithOptions", LabeledBody, without=OF_TEXTS)


class Conversation(Body):
    id: str


def _conversation(value: Any) -> Any:
    return {"id": value} if isinstance(value, str) else value


class ResponseBody(_WithOptions, ToolBody):
    """A body of /v1/responses."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [{"required": [name]} for name in ("input", "previous_response_id", "conversation")]
        }
    )
    input: Annotated[list[dict[str, Any]] | None, BeforeValidator(_items), WithJsonSchema(_ITEMS)] = None
    previous_response_id: Annotated[str | None, NeedsStore()] = None
    conversation: Annotated[Conversation | None, BeforeValidator(_conversation), NeedsStore()] = None
    store: Annotated[bool | None, NeedsStore(hint=True)] = None
    background: Annotated[bool | None, NeedsStore()] = None
    instructions: str | None = None
    max_output_tokens: Length = None
    text: Annotated[TextOptions | None, Whole] = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Literal[_INCLUDABLE]] | None, BeforeValidator(_include)] = None  # type: ignore[valid-type]
    tools: Annotated[Tools, BeforeValidator(_nested_tools)] = None
    tool_choice: Annotated[ToolChoice, BeforeValidator(_nested_choice)] = None
    truncation: Annotated[Literal["auto", "disabled"] | None, expected("auto or disabled", "invalid_value")] = None
    metadata: Metadata = None
    client_metadata: Label = None
    max_tool_calls: Annotated[int | None, Field(ge=1, description="Of tools that a server runs: Onward runs none.")] = (
        None
    )
    stream_options: Annotated[ResponseStreamOptions | None, Whole] = None
    prompt: Annotated[Any, Unserved()] = None

    @model_validator(mode="after")
    def _check_storage(self) -> Self:
        if self.previous_response_id is not None and self.conversation is not None:
            raise FieldError("and conversation exclude each other: give one of them", at="previous_response_id")
        if self.input is None and self.base is None:
            raise FieldError("is required", "missing_required_parameter", "input")
        if self.background and self.stream:
            raise FieldError("is not supported in a stream: remove one of the two", "unsupported_value", "background")
        for name in ("background", "conversation"):
            if self.store is False and getattr(self, name):
                raise FieldError("cannot be combined with store: false", at=name)
        return self

    @property
    def base(self) -> str | None:
        """The response or the conversation that this one continues."""
        return self.previous_response_id if self.conversation is None else self.conversation.id

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self._with_logprobs:
            raise FieldError(f"requires include: [{_LOGPROBS!r}]", at="top_logprobs")
        return self

    @property
    def _with_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def set_options(self) -> dict[str, Any]:
        options = super().set_options()
        if self.max_output_tokens is not None:
            options["max_new_tokens"] = self.max_output_tokens
        if self._with_logprobs:
            options["logprobs"] = self.top_logprobs or 0
        format = None if self.text is None else self.text.format
        if format is not None and format.type != "text":
            options["json_schema"] = {"type": "object"} if format.schema_ is None else format.schema_
        return options

    def field_of(self, option: str) -> str:
        if option == "json_schema":
            return option if "json_schema" in self.model_fields_set else "text"
        return _FIELDS[option] if option in _FIELDS else super().field_of(option)

    def place_of(self, path: str) -> str:
        place = super().place_of(path)
        place = re.sub(r"^(tools\[\d+\])\.(?:function|custom)\b", r"\1", place)  # tools are not nested here
        return re.sub(r"^(tools\[\d+\]\.format)\.grammar\b", r"\1", place)


# Fields, by the options that they set under another name.
_FIELDS = {
    "max_new_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning",
}


class Responses(Protocol):
    path, summary, kind = "/v1/responses", "Generate a response.", "response"
    body, response = ResponseBody, Response

    def prompts(self, body: ResponseBody, context: ModelContext) -> Prompts:
        stored, conversation = context.stored, None if body.conversation is None else body.conversation.id
        before = [] if stored is None or body.base is None else stored.before(body.previous_response_id, conversation)
        items = resolved(body.input or (), stored)
        messages = messages_of(before, items, context.limits, "input")
        if body.instructions is not None:
            messages.insert(0, {"role": "system", "content": body.instructions})
        storage = None if stored is None or body.store is False else Storage(body.base, items)
        return Prompts((_request(body, context, messages),), storage=storage)

    def answer(self, body: ParsedBody, completions: Sequence[Completion]) -> dict[str, Any]:
        """The result of its stream's events."""
        return ResponseEventStream(body).whole(completions[0])

    def events(self, body: ParsedBody) -> ResponseEventStream:
        return ResponseEventStream(body)

    def early_error(self, error: OnwardError) -> str:
        fields = error_fields(error)
        event = {"type": "error", "code": fields["code"], "message": fields["message"], "param": fields["param"]}
        return f"event: error\ndata: {json.dumps(event | {'sequence_number': 0})}\n\n"


def _request(body: ResponseBody, context: ModelContext, messages: Sequence[dict[str, Any]]) -> Request:
    """The request of a conversation. With truncation: "auto", the oldest messages are dropped until it fits the
    context, except system messages at the beginning. A tool's output is dropped with its call."""
    template = context.lm.chat_template
    if body.text is not None and body.text.verbosity and template is not None and "verbosity" in template.variables:
        context = replace(context, variables={"verbosity": body.text.verbosity, **context.variables})
    effort = None if body.reasoning is None else body.reasoning.effort
    start = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [at for at, message in enumerate(messages) if at == start or (at > start and message["role"] != "tool")]

    def request(place: int) -> Request:
        return body.chat_request(context, [*messages[:start], *messages[starts[place] :]], effort)

    def fits(place: int) -> bool:
        try:
            request(place)
        except ContextOverflowError:
            return False
        return True

    if body.truncation != "auto" or not starts:
        return body.chat_request(context, messages, effort)
    place = 0 if fits(0) else bisect_left(range(len(starts)), True, lo=1, key=fits)
    return request(min(place, len(starts) - 1))
