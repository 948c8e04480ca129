"""/v1/chat/completions: OpenAI's chat completions, with Onward's options as further fields."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from onward.decoding.speculation import PredictedOutput, Speculator
from onward.errors import RequestError
from onward.language_model import LanguageModel, Request, split_chat_options
from onward.language_model.options import option_names
from onward.language_model.request import check_length
from onward.protocols.answers import ChatCompletion
from onward.protocols.body import AtMost, Body, Expected, FieldError, JsonSchema, Values, Whole
from onward.protocols.chunks import ChunkedProtocol
from onward.protocols.errors import BodyError
from onward.protocols.messages import Messages, Text, template_form
from onward.protocols.openai import CompletionsBody, LogprobCount
from onward.protocols.options import OptionsBody
from onward.protocols.protocol import ModelContext, Prompts
from onward.util.text import brief

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
    Expected("a list of tools", "invalid_value"),
]
_CHOICE: JsonSchema = {"anyOf": [{"enum": ["auto", "none", "required", None]}, {"type": "object"}]}
ToolChoice = Annotated[
    str | dict[str, Any] | None, Expected("a string or an object", "invalid_value"), WithJsonSchema(_CHOICE)
]
Flag = Annotated[bool | None, Expected("true or false", "invalid_value")]
TemplateVariables = Annotated[dict[str, Any] | None, Values("template_values")]


FormatType = Annotated[
    Literal["text", "json_object", "json_schema"], Expected("text, json_object or json_schema", "unsupported_value")
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
    response_format: Annotated[ResponseFormat | None, Whole()] = None
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


class ChatCompletions(ChunkedProtocol):
    path, summary, kind = "/v1/chat/completions", "Generate a chat completion.", "chat.completion"
    body, response = ChatBody, ChatCompletion

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
