"""/v1/responses: OpenAI's responses, which are read as the equivalent chats. Nothing is stored."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from onward.language_model import Completion
from onward.protocols.body import Body, FieldError, Unserved, Validation, Values, Whole, validation_of
from onward.protocols.chat import FormatType, ToolBody, ToolChoice, Tools, joined_text
from onward.protocols.options import LabeledBody, Length, body_with_options
from onward.protocols.protocol import ModelContext, ParsedBody, Prompts, Protocol
from onward.protocols.responses_events import Response, ResponseEventStream, response_body
from onward.tokenizer import Tokenizer
from onward.util.text import brief

_LOGPROBS = "message.output_text.logprobs"  # the only supported value of `include`
_TEXT_PARTS = ("input_text", "output_text", "text")
# Options of texts in general that responses do not have.
_NOT_FIELDS = ("n", "beams", "length_penalty", "early_stopping", "stop", "prompt_logprobs")


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
    verbosity: Annotated[Any, Unserved(("medium",), hint=True)] = None


class Reasoning(Body):
    effort: str | None = None
    summary: Annotated[Any, Unserved(hint=True)] = None
    generate_summary: Annotated[Any, Unserved(hint=True)] = None


def _include(value: Any) -> Any:
    if value is not None and (not isinstance(value, list) or any(each != _LOGPROBS for each in value)):
        raise FieldError(f"supports only [{_LOGPROBS!r}]; got {brief(value)}")
    return value


def _nested_tools(value: Any) -> list[Any]:
    """Tools of chats from those of responses, whose functions are not nested."""
    if not isinstance(value, list):
        raise FieldError(f"must be a list; got {brief(value)}", "invalid_type")
    tools = []
    for at, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise FieldError(f"must be a function; got {brief(tool)}", "unsupported_value", f"[{at}]")
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _nested_choice(value: Any) -> Any:
    """A choice of chats from one of responses, whose function is not nested."""
    if isinstance(value, dict) and value.get("type") == "function" and "name" in value:
        return {"type": "function", "function": {"name": value["name"]}}
    return value


def _messages(value: Any, info: ValidationInfo) -> list[dict[str, Any]]:
    """A text, or items, as the messages of a chat."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise FieldError(f"must be a string or a list of items; got {brief(value)}", "invalid_type")
    validation = validation_of(info)
    if len(value) > validation.limits.messages:
        raise FieldError(f"has {len(value)} items; this server allows at most {validation.limits.messages}")
    messages = _MessageBuilder(validation)
    for at, item in enumerate(value):
        messages.add(item, f"[{at}]")
    return messages.messages


_ITEMS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}


class _MessageBuilder:
    """Makes messages of items. Consecutive reasoning, text and calls of the assistant are one message."""

    def __init__(self, validation: Validation) -> None:
        self.messages: list[dict[str, Any]] = []
        self._validation = validation

    def add(self, item: Any, at: str) -> None:
        """Add an item. Raises `FieldError`: it is invalid. at: its place."""
        if not isinstance(item, dict):
            raise FieldError(f"must be an object; got {brief(item)}", "invalid_type", at)
        kind = item.get("type", "message")
        if kind == "message":
            role, content = item.get("role"), self._text(item.get("content"), f"{at}.content")
            if not isinstance(role, str):
                raise FieldError(f"must have a role; got {brief(item)}", "invalid_type", at)
            message = {"role": "system" if role == "developer" else role, "content": content}
            self._join(message) if role == "assistant" else self.messages.append(message)
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or ""}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not all(isinstance(value, str) for value in (call["id"], *function.values())):
                problem = f"must have a call_id, a name and arguments; got {brief(item)}"
                raise FieldError(problem, "invalid_type", at)
            self._join({"tool_calls": [call]})
        elif kind == "function_call_output":
            if not isinstance(call_id := item.get("call_id"), str):
                raise FieldError(f"must have a call_id; got {brief(item)}", "invalid_type", at)
            output = self._text(item.get("output"), f"{at}.output")
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "reasoning":
            parts = item.get("content") or []
            if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
                problem = f"must be a list of parts; got {brief(parts)}"
                raise FieldError(problem, "invalid_type", f"{at}.content")
            text = "".join([str(part.get("text", "")) for part in parts])
            self._join({"reasoning": text} if text else {})
        else:
            raise FieldError(f"is of the type {brief(kind)}, which is not supported", "unsupported_value", at)

    def _join(self, part: Mapping[str, Any]) -> None:
        """Merge a part into the last message if that is the assistant's and lacks it; otherwise start a message."""
        last = self.messages[-1] if self.messages else {}
        overlaps = any(last.get(name) is not None for name in part if name not in ("role", "tool_calls"))
        if last.get("role") != "assistant" or overlaps:
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        if "tool_calls" in part:
            last.setdefault("tool_calls", []).extend(part["tool_calls"])
        last |= {name: value for name, value in part.items() if name != "tool_calls"}

    def _text(self, content: Any, at: str) -> str:
        if content is None:
            raise FieldError("must be a string or a list of text parts; got null", "invalid_type", at)
        try:
            return joined_text(content, self._validation, _TEXT_PARTS)  # type: ignore[no-any-return]
        except FieldError as problem:
            raise FieldError(problem.problem, problem.code, f"{at}{problem.at}") from None


if TYPE_CHECKING:
    _WithOptions = LabeledBody
else:
    _WithOptions = body_with_options("_WithOptions", LabeledBody, without=_NOT_FIELDS)


class ResponseBody(_WithOptions, ToolBody):
    """A body of /v1/responses."""

    input: Annotated[list[dict[str, Any]], BeforeValidator(_messages), WithJsonSchema(_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Length = None
    text: Annotated[TextOptions | None, Whole] = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]] | None, BeforeValidator(_include)] = None
    tools: Annotated[Tools, BeforeValidator(_nested_tools)] = None
    tool_choice: Annotated[ToolChoice, BeforeValidator(_nested_choice)] = None
    background: Annotated[Any, Unserved((False,))] = None
    conversation: Annotated[Any, Unserved()] = None
    max_tool_calls: Annotated[Any, Unserved()] = None
    previous_response_id: Annotated[Any, Unserved()] = None
    prompt: Annotated[Any, Unserved()] = None
    truncation: Annotated[Any, Unserved(("disabled",))] = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.include:
            raise FieldError(f"requires include: [{_LOGPROBS!r}]", at="top_logprobs")
        return self

    def set_options(self) -> dict[str, Any]:
        options = super().set_options()
        if self.max_output_tokens is not None:
            options["max_new_tokens"] = self.max_output_tokens
        if self.include:
            options["logprobs"] = self.top_logprobs or 0
        format = None if self.text is None else self.text.format
        if format is not None and format.type != "text":
            options["json_schema"] = {"type": "object"} if format.schema_ is None else format.schema_
        return options

    def field_of(self, option: str) -> str:
        if option == "json_schema":
            return option if "json_schema" in self.model_fields_set else "text"
        return _FIELDS.get(option, option)

    def place_of(self, path: str) -> str:
        place = super().place_of(path)
        return re.sub(r"^(tools\[\d+\])\.function\b", r"\1", place)  # functions are not nested here


# Fields, by the options that they set under another name.
_FIELDS = {
    "max_new_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning",
}


class Responses(Protocol):
    path, summary, kind = "/v1/responses", "Generate a response; nothing is stored.", "response"
    body, response = ResponseBody, Response

    def prompts(self, body: ResponseBody, context: ModelContext) -> Prompts:
        system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        effort = None if body.reasoning is None else body.reasoning.effort
        return Prompts((body.chat_request(context, [*system, *body.input], effort),))

    def answer(
        self, body: ParsedBody, completions: Sequence[Completion], tokenizer: Tokenizer, version: str
    ) -> dict[str, Any]:
        return response_body(body, completions[0], tokenizer, version)

    def events(self, body: ParsedBody, tokenizer: Tokenizer, version: str) -> ResponseEventStream:
        return ResponseEventStream(body, tokenizer, version)
