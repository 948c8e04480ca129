"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages, which are read as the equivalent chats."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from onward.errors import ContextOverflowError, OnwardError
from onward.language_model import Completion, LanguageModel
from onward.protocols.body import (
    AtMost,
    Body,
    FieldError,
    Label,
    ShortTexts,
    Unserved,
    Values,
    expected,
    validation_of,
)
from onward.protocols.chat import TemplateBody
from onward.protocols.messages_events import (
    NO_THREADS,
    Message,
    MessageErrorBody,
    MessageEventStream,
    message_body,
    message_error,
)
from onward.protocols.messages_input import (
    MESSAGE_SCHEMA,
    TEXT_SCHEMA,
    TOOL_SCHEMA,
    chat_messages,
    chat_tools,
    joined,
    text_of,
)
from onward.protocols.options import BUDGETS, DECLARED, OF_TEXTS, Declared, ReceiptField, body_with_options, synonyms
from onward.protocols.protocol import ModelContext, ParsedBody, Prompts, Protocol
from onward.util.text import brief


class Thinking(Body):
    """Whether the model reasons, if its chat template has a switch for that; and for how many tokens at most."""

    type: Annotated[
        Literal["enabled", "adaptive", "disabled"], expected("enabled, adaptive or disabled", "unsupported_value")
    ]
    budget_tokens: Annotated[
        Annotated[int, Field(ge=1)] | None, expected("a whole number of 1 or more", "invalid_value")
    ] = None
    display: Annotated[
        Literal["summarized", "omitted"] | None, expected("summarized or omitted", "unsupported_value")
    ] = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if (self.type == "enabled") is (self.budget_tokens is None):
            raise FieldError('is required with the type "enabled", and with no other', at=".budget_tokens")
        return self


class OutputFormat(Body):
    """The JSON Schema of the text."""

    type: Annotated[Literal["json_schema"], expected('"json_schema"', "unsupported_value")]
    schema_: Annotated[dict[str, Any], Values("schema_values", "schema_depth")] = Field(alias="schema")


class OutputConfig(Body):
    """effort: of the reasoning, for chat templates that read it."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        expected("low, medium, high, xhigh or max", "invalid_value"),
    ] = None
    format: OutputFormat | None = None
    task_budget: Annotated[Any, Unserved(hint=True)] = None


class ToolChoice(Body):
    """Whether and how tools may be called."""

    type: Annotated[Literal["auto", "any", "tool", "none"], expected("auto, any, tool or none", "unsupported_value")]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") is (self.name is None):
            raise FieldError('is required with the type "tool", and with no other', at=".name")
        return self

    def options(self) -> dict[str, Any]:
        """The choice as options of `LanguageModel.chat`."""
        named = {"type": "function", "function": {"name": self.name}}
        choice: Any = {"any": "required", "tool": named}.get(self.type, self.type)
        return {"tool_choice": choice, **({"parallel_tool_calls": False} if self.disable_parallel_tool_use else {})}


def _context_management(value: Any) -> Any:
    """Edits of the prompt; only one that keeps all of it is served."""
    edits = value.get("edits") if isinstance(value, dict) and not set(value) - {"edits"} else None
    supported = ("clear_thinking_20251015", "all")
    for at, edit in enumerate(edits if isinstance(edits, list) else [None] if value is not None else ()):
        if not isinstance(edit, dict) or (edit.get("type"), edit.get("keep")) != supported:
            problem = f"supports only {{'type': {supported[0]!r}, 'keep': {supported[1]!r}}}; got {brief(edit)}"
            raise FieldError(problem, "unsupported_value", f".edits[{at}]")
    return value


def _thread(value: Any) -> Any:
    """A conversation that the server stores. Clients send the whole one if an error has this code."""
    if value is not None:
        raise FieldError("is not supported: remove it, and send all messages", NO_THREADS)
    return value


_System = Annotated[
    str | None,
    BeforeValidator(lambda value, info: value if value is None else text_of(value, validation_of(info))),
    WithJsonSchema(TEXT_SCHEMA),
]
_Messages = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(MESSAGE_SCHEMA)]],
    Field(min_length=1),
    BeforeValidator(chat_messages),
    AtMost("messages", "messages"),
]
_Tools = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(TOOL_SCHEMA)]] | None,
    BeforeValidator(chat_tools),
    Values("schema_values"),
    AtMost("tools", "tools"),
]
_Stops = Annotated[
    list[str] | None,
    AtMost("stop_strings", "strings"),
    ShortTexts("stop_characters"),
    Declared(DECLARED["stop"]),
]


class CountBody(TemplateBody):
    """A body of /v1/messages/count_tokens: the fields that determine the prompt, and those without effect."""

    messages: _Messages
    system: _System = None
    tools: _Tools = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Label = None
    context_management: Annotated[Any, BeforeValidator(_context_management)] = None
    mcp_servers: Annotated[Any, Unserved(([],))] = None
    thread: Annotated[Any, BeforeValidator(_thread)] = None
    speed: Annotated[Any, Unserved(("standard",), hint=True)] = None
    user_profile_id: Label = None
    workspace_id: Label = None
    stream: Annotated[Any, Unserved((False,))] = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise FieldError("means the same as output_config.format: use one of them", at="output_format")
        return self

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages of the chat."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return joined([*system, *self.messages])

    def with_variables(self, context: ModelContext) -> ModelContext:
        """The context with the variables of the chat template that `thinking` and `output_config` set."""
        template, variables = context.lm.chat_template, {**context.variables}
        if template is None:
            return context
        if self.thinking is not None and template.thinking_switch is not None:
            variables[template.thinking_switch] = self.thinking.type != "disabled"
        effort = None if self.output_config is None else self.output_config.effort
        if effort is not None and "reasoning_effort" in template.variables:
            variables["reasoning_effort"] = "high" if effort in ("xhigh", "max") else effort  # the highest they know
        return replace(context, variables=variables)

    def chat_options(self) -> dict[str, Any]:
        tools: dict[str, Any] = {} if self.tools is None else {"tools": self.tools}
        ends = {"continue_final_message": True} if self.messages[-1]["role"] == "assistant" else {}
        return {**tools, **ends, **({} if self.tool_choice is None else self.tool_choice.options())}

    def field_of(self, option: str) -> str:
        if option == "reasoning_budget" and self.thinking is not None:
            return "thinking"
        if option == "json_schema" and option not in self.model_fields_set:
            return "output_config" if self.output_format is None else "output_format"
        return _FIELDS[option] if option in _FIELDS else super().field_of(option)

    def place_of(self, path: str) -> str:
        place = super().place_of(path)
        place = re.sub(r"^(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema", place)
        return re.sub(r"^(tools\[\d+\])\.function\b", r"\1", place)


# Fields, by the options that they set under another name.
_FIELDS = {
    "continue_final_message": "messages",
    "max_new_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice",
    "prompt": "messages",
    "stop": "stop_sequences",
}

if TYPE_CHECKING:
    _WithOptions = CountBody
else:
    _WithOptions = body_with_options("_WithOptions", CountBody, without=OF_TEXTS)


class MessagesBody(_WithOptions):
    """A body of /v1/messages."""

    max_tokens: Annotated[int, Declared(DECLARED["max_new_tokens"])]
    stop_sequences: _Stops = None
    stream: bool | None = None
    receipt: ReceiptField = None
    metadata: Label = None
    diagnostics: Label = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, expected("auto or standard_only", "invalid_value")
    ] = None
    container: Annotated[Any, Unserved()] = None
    inference_geo: Annotated[Any, Unserved(hint=True)] = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.thinking is not None and (names := synonyms(self, BUDGETS)):
            raise FieldError("cannot be combined with thinking: use one of the two", at=next(iter(names)))
        return self

    def set_options(self) -> dict[str, Any]:
        options = super().set_options()
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            options["reasoning_budget"] = self.thinking.budget_tokens
        if self.stop_sequences is not None:
            options["stop"] = self.stop_sequences
        format = self.output_format or (None if self.output_config is None else self.output_config.format)
        if format is not None:
            options["json_schema"] = format.schema_
        return options


def _reasons_always(lm: LanguageModel) -> bool:
    """Whether the chat template has reasoning, but no switch for it."""
    template = lm.chat_template
    if template is None or template.thinking_switch is not None:
        return False
    return any(mark in source for source in template.sources for mark in lm.message_format.thinking)


class Messages(Protocol):
    path, summary, kind = "/v1/messages", "Generate a message, as in Anthropic's API.", "message"
    body, response, failure = MessagesBody, Message, MessageErrorBody
    failure_event, idle = "event: error\n", 'event: ping\ndata: {"type":"ping"}\n\n'

    def prompts(self, body: MessagesBody, context: ModelContext) -> Prompts:
        """As in Anthropic's API, a text may end at the end of the context before it has `max_tokens`."""
        more: dict[str, Any] = {"max_new_tokens": body.max_tokens if context.lm.model.max_seq_len is None else None}
        if body.thinking is not None and body.thinking.type == "disabled" and _reasons_always(context.lm):
            more["reasoning_budget"] = 0
        try:
            request = body.chat_request(body.with_variables(context), body.conversation, None, **more)
        except ContextOverflowError as error:  # agents look for these words, and then shorten the conversation
            raise ContextOverflowError(f"prompt is too long: {error}", option=error.option) from error
        if request.max_new_tokens > body.max_tokens:
            request = request.replace(max_new_tokens=body.max_tokens)
        return Prompts((request,))

    def answer(self, body: ParsedBody, completions: Sequence[Completion]) -> dict[str, Any]:
        return message_body(body, completions[0])

    def events(self, body: ParsedBody) -> MessageEventStream:
        return MessageEventStream(body)

    def error(self, error: OnwardError, request_id: str = "") -> dict[str, Any]:
        return message_error(error, request_id)
