"""/v1/chat/completions: OpenAI's chat completions, with Onward's options as further fields."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Required, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

from onward.chat import MessageDelta
from onward.decoding.speculation import PredictedOutput, Speculator
from onward.errors import RequestError
from onward.language_model import Completion, LanguageModel, Piece, Request, split_chat_options
from onward.language_model.options import option_names
from onward.language_model.request import check_length
from onward.protocols.body import (
    AtMost,
    Body,
    BodyError,
    FieldError,
    JsonSchema,
    Validation,
    Values,
    Whole,
    expected,
    validation_of,
)
from onward.protocols.choices import Choice, ChoicesProtocol, ChoicesResponse, ChoiceStream
from onward.protocols.logprobs import logprob_entries, prompt_logprobs
from onward.protocols.options import CompletionsBody, LogprobCount, OptionsBody
from onward.protocols.protocol import ModelContext, ParsedBody, Prompts
from onward.sampling import TokenLogprobs
from onward.tokenizer import Tokenizer
from onward.tokenizer.text_stream import TokenText, token_texts
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
    """Messages for the chat template, each with a content."""
    return [{**message, "content": message.get("content")} for message in messages]


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
_TOOL: JsonSchema = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
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
TemplateVariables = Annotated[dict[str, Any] | None, Values("template_values")]


FormatType = Annotated[
    Literal["text", "json_object", "json_schema"], expected("text, json_object or json_schema", "unsupported_value")
]


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Values("schema_values", "schema_depth")] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the text."""

    type: FormatType
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") is (self.json_schema is None):
            form = 'must be {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
            raise FieldError(form, "invalid_type")
        return self

    @property
    def text_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the text; None for any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class Prediction(Body):
    """The probable text, or most of it: decoding is faster where it is right."""

    type: str
    content: Text

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type != "content":
            raise FieldError(f'must have the type "content"; got {brief(self.type)}', "invalid_type")
        if self.content is None:
            raise FieldError("must be a string or a list of text parts; got null", "invalid_type", ".content")
        return self


class ToolBody(OptionsBody):
    """The fields of protocols with messages and tools."""

    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Flag = None
    top_logprobs: LogprobCount = None
    chat_template_kwargs: TemplateVariables = None

    def chat_request(
        self, context: ModelContext, messages: Sequence[Mapping[str, Any]], effort: str | None, **more: Any
    ) -> Request:
        """The request of a conversation. effort: of reasoning. more: further options of `LanguageModel.chat`."""
        own = self.chat_template_kwargs or {}
        template = {
            **context.variables,
            **template_variables(context.lm, own, effort, self.field_of("reasoning_effort")),
        }
        tools = ("tools", "tool_choice", "parallel_tool_calls")
        more |= {name: getattr(self, name) for name in tools if name in self.model_fields_set}
        options = {**context.options, **self.set_options(), "now": context.now, **more}
        return context.lm.chat_request(messages, **options, template=template)


def template_variables(
    lm: LanguageModel, variables: Mapping[str, Any], effort: str | None = None, effort_field: str = "reasoning_effort"
) -> dict[str, Any]:
    """The chat template's variables in a body. Raises `RequestError` for names that the template doesn't read."""
    if effort is not None and "reasoning_effort" not in variables:
        _check_variables(lm, {"reasoning_effort": effort}, effort_field)
        variables = {"reasoning_effort": effort, **variables}
    _check_variables(lm, variables, "chat_template_kwargs")
    return dict(variables)


def _check_variables(lm: LanguageModel, variables: Mapping[str, Any], field: str) -> None:
    try:  # they may have the names of options
        split_chat_options(lm.chat_template, dict.fromkeys(set(variables) - set(option_names())))
    except RequestError as error:
        raise BodyError(str(error), field) from error


class ChatBody(CompletionsBody, ToolBody):
    """A body of /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    response_format: Annotated[ResponseFormat | None, Whole] = None
    prediction: Prediction | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("requires logprobs: true", at="top_logprobs")
        return self

    def field_of(self, option: str) -> str:
        if option == "logprobs" and self.top_logprobs is not None:
            return "top_logprobs"
        if option == "json_schema" and self.response_format is not None:
            return "response_format"
        return "messages" if option == "prompt" else super().field_of(option)


class ChatMessage(BaseModel):
    """The message of a chat completion."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Choice):
    """A choice of a chat completion."""

    message: ChatMessage


class ChatCompletion(ChoicesResponse):
    """A response of /v1/chat/completions, for the OpenAPI document."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


# The names of reasoning: clients read one or the other.
_REASONING = ("reasoning", "reasoning_content")


def delta_body(delta: MessageDelta) -> dict[str, Any]:
    """The "delta" of a chunk, without the role."""
    body: dict[str, Any] = {"content": delta.content} if delta.content else {}
    if delta.reasoning:
        body |= dict.fromkeys(_REASONING, delta.reasoning)
    if delta.tool_calls:
        body["tool_calls"] = calls = []
        for call in delta.tool_calls:
            start = {} if call.id is None else {"id": call.id, "type": "function"}
            name = {} if call.id is None else {"name": call.name}
            calls.append({"index": call.index, **start, "function": {**name, "arguments": call.arguments}})
    return body


_EMPTY = MessageDelta()


class _ChatStream(ChoiceStream):
    opening, closing, empty = '"delta":{"content":', "}", '"delta":{}'
    _has_role = False

    def push(self, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        """Reasoning and tool calls have chunks of their own."""
        if len(pieces) > 1 and any((part := each.message) and (part.reasoning or part.tool_calls) for each in pieces):
            return [(at + 1, chunk) for at, piece in enumerate(pieces) for _, chunk in self.push([piece])]
        return super().push(pieces)

    def rest(self, completion: Completion) -> list[str]:
        """What was not sent, and the role if nothing was."""
        parts = super().rest(completion)
        return parts if parts or self._has_role else self._parts(_EMPTY, {})

    def joined(self, pieces: Sequence[Piece]) -> MessageDelta:
        if len(pieces) == 1:
            return pieces[0].message or _EMPTY
        return MessageDelta("".join([piece.message.content for piece in pieces if piece.message is not None]))

    def unsent(self, completion: Completion) -> MessageDelta:
        message = None if self._tokens else completion.message  # of beam search
        return _EMPTY if message is None else message.as_delta()

    def plain(self, delta: MessageDelta) -> str | None:
        return delta.content if self._has_role and not (delta.reasoning or delta.tool_calls) else None

    def fields(self, delta: MessageDelta) -> dict[str, Any]:
        role = {} if self._has_role else {"role": "assistant"}
        self._has_role = True
        return {"delta": role | (delta_body(delta) or {"content": ""})}

    def logprobs(self, tokens: Sequence[TokenText], ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
        return {"content": logprob_entries(tokens, ids, entries), "refusal": None}


class ChatCompletions(ChoicesProtocol):
    path, summary, kind = "/v1/chat/completions", "Generate a chat completion.", "chat.completion"
    body, response = ChatBody, ChatCompletion
    prefix, chunk_kind, choice_stream = "chatcmpl", "chat.completion.chunk", _ChatStream

    def prompts(self, body: ChatBody, context: ModelContext) -> Prompts:
        more: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
        if body.prediction is not None:
            text = body.prediction.content or ""
            check_length(text, context.lm.tokenizer, context.lm.model.max_seq_len, "prediction")
            predicted = context.lm.encode(text, add_special_tokens=False)
            more["draft"] = Speculator(PredictedOutput(predicted))
        if body.response_format is not None and (schema := body.response_format.text_schema) is not None:
            more["json_schema"] = schema
        return Prompts((body.chat_request(context, template_form(body.messages), body.reasoning_effort, **more),))

    def answer(
        self, body: ParsedBody, completions: Sequence[Completion], tokenizer: Tokenizer, version: str
    ) -> dict[str, Any]:
        answer = super().answer(body, completions, tokenizer, version)
        if body.values.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(body.requests[0], completions[0], tokenizer)
        return answer

    def choice(
        self, body: ParsedBody, at: int, completion: Completion, text: Completion, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        logprobs = None
        if text.logprobs is not None:
            tokens = token_texts(text.token_ids, text.logprobs, body.requests[at].prompt, tokenizer)
            logprobs = {"content": logprob_entries(tokens, text.token_ids, text.logprobs), "refusal": None}
        assert text.message is not None, "a chat's text is parsed as a message"
        message = text.message.to_dict()
        if text.message.reasoning is not None:
            message |= dict.fromkeys(_REASONING, text.message.reasoning)
        return {"message": message | {"refusal": None}, "logprobs": logprobs}
