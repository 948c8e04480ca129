"""/v1/chat/completions: OpenAI's chat completions, with Onward's options as further fields."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    model_validator,
)

from onward.chat import PROMPT_ENDINGS, MessageDelta
from onward.chat.message import TEXT_KEYS
from onward.decoding.speculation import PredictedOutput, Speculator
from onward.errors import RequestError
from onward.language_model import Completion, LanguageModel, Piece, Request, split_chat_options
from onward.language_model.options import option_names
from onward.language_model.request import check_length
from onward.protocols.body import (
    Body,
    BodyError,
    FieldError,
    Values,
    Whole,
    expected,
)
from onward.protocols.chat_fields import (
    Flag,
    FunctionCall,
    Functions,
    Messages,
    Text,
    ToolChoice,
    Tools,
    template_form,
)
from onward.protocols.choices import Choice, ChoicesProtocol, ChoicesResponse, ChoiceStream
from onward.protocols.logprobs import logprob_entries, prompt_logprobs
from onward.protocols.options import BUDGETS, Budget, CompletionsBody, LogprobCount, OptionsBody, synonyms
from onward.protocols.protocol import ModelContext, ParsedBody, Prompts
from onward.sampling import TokenLogprobs
from onward.tokenizer.text_stream import TokenText, token_texts
from onward.util.text import brief

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


class TemplateBody(OptionsBody):
    """A body with messages, which a chat template writes as the prompt."""

    chat_template_kwargs: TemplateVariables = None
    thinking_token_budget: Budget = None
    thinking_budget_tokens: Budget = None

    @model_validator(mode="after")
    def _check_budgets(self) -> Self:
        synonyms(self, BUDGETS)
        return self

    def set_options(self) -> dict[str, Any]:
        budgets = synonyms(self, BUDGETS).values()
        return {**super().set_options(), **({"reasoning_budget": next(iter(budgets))} if budgets else {})}

    def field_of(self, option: str) -> str:
        if option == "reasoning_budget":
            return next((name for name in BUDGETS if name in self.model_fields_set), option)
        return super().field_of(option)

    def chat_options(self) -> dict[str, Any]:
        """The options of `LanguageModel.chat` that the body sets: tools, and how they may be called."""
        return {}

    def chat_request(
        self, context: ModelContext, messages: Sequence[Mapping[str, Any]], effort: str | None, **more: Any
    ) -> Request:
        """The request of a conversation. effort: of reasoning. more: further options of `LanguageModel.chat`."""
        own = self.chat_template_kwargs or {}
        template = {**context.variables, **template_variables(context.lm, own)}
        if effort is not None and "reasoning_effort" not in own:
            template["reasoning_effort"] = effort
        more |= {name: getattr(self, name) for name in PROMPT_ENDINGS if name in self.model_fields_set}
        options = {**self.options(context), "now": context.now, **self.chat_options(), **more}
        return context.lm.chat_request(messages, **options, template=template)


class ToolBody(TemplateBody):
    """The fields of OpenAI's protocols with messages and tools."""

    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Flag = None
    top_logprobs: LogprobCount = None

    def chat_options(self) -> dict[str, Any]:
        names = ("tools", "tool_choice", "parallel_tool_calls")
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}


def template_variables(lm: LanguageModel, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template's variables in a body. Raises `BodyError` for names that the template doesn't read."""
    try:  # they may have the names of options
        split_chat_options(lm.chat_template, dict.fromkeys(set(variables) - set(option_names())))
    except RequestError as error:
        raise BodyError(str(error), "chat_template_kwargs") from error
    return dict(variables)


class ChatBody(CompletionsBody, ToolBody):
    """A body of /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    response_format: Annotated[ResponseFormat | None, Whole] = None
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    functions: Functions = None
    function_call: FunctionCall = None

    @model_validator(mode="after")
    def _check_functions(self) -> Self:
        tools = next((name for name in ("tools", "tool_choice") if getattr(self, name) is not None), None)
        if self.functions is not None and tools is not None:
            raise FieldError(f"and {tools} exclude each other: use tools", at="functions")
        if isinstance(self.function_call, dict) and not self.functions:
            raise FieldError("requires functions: add them", at="function_call")
        if isinstance(self.function_call, dict) and not isinstance(self.function_call.get("name"), str):
            problem = f"must be 'auto', 'none' or {{'name': …}}; got {brief(self.function_call)}"
            raise FieldError(problem, at="function_call")
        return self

    def chat_options(self) -> dict[str, Any]:
        """Functions are tools, of which an answer calls one at most."""
        options = super().chat_options()
        if not self.functions:
            return options
        call = self.function_call
        choice = {"type": "function", "function": call} if isinstance(call, dict) else call
        tools = [{"type": "function", "function": function} for function in self.functions]
        return options | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("requires logprobs: true", at="top_logprobs")
        return self

    def constraints(self) -> dict[str, tuple[str, Any]]:
        schema = None if self.response_format is None else self.response_format.text_schema
        return super().constraints() | ({} if schema is None else {"response_format": ("json_schema", schema)})

    def field_of(self, option: str) -> str:
        if option == "logprobs" and self.top_logprobs is not None:
            return "top_logprobs"
        if self.functions:
            option = {"tools": "functions", "tool_choice": "function_call"}.get(option, option)
        return "messages" if option == "prompt" else super().field_of(option)

    def place_of(self, path: str) -> str:
        return re.sub(r"^(functions\[\d+\])\.function\b", r"\1", super().place_of(path))


class ChatMessage(BaseModel):
    """The message of a chat completion."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None


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
            start = {} if call.id is None else {"id": call.id, "type": call.type}
            name = {} if call.id is None else {"name": call.name}
            calls.append({"index": call.index, **start, call.type: {**name, TEXT_KEYS[call.type]: call.arguments}})
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


class _FunctionStream(_ChatStream):
    """The stream of a body with `functions`."""

    def fields(self, delta: MessageDelta) -> dict[str, Any]:
        return {"delta": _with_function_call(super().fields(delta)["delta"])}


def _with_function_call(message: dict[str, Any]) -> dict[str, Any]:
    """A message, or its delta, with a call in the form of older clients."""
    call, *_ = message.pop("tool_calls", None) or (None,)
    return message if call is None else message | {"function_call": call["function"]}


class ChatCompletions(ChoicesProtocol):
    path, summary, kind = "/v1/chat/completions", "Generate a chat completion.", "chat.completion"
    body, response = ChatBody, ChatCompletion
    prefix, chunk_kind = "chatcmpl", "chat.completion.chunk"

    def prompts(self, body: ChatBody, context: ModelContext) -> Prompts:
        more: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
        if body.prediction is not None:
            text = body.prediction.content or ""
            check_length(text, context.lm.tokenizer, context.lm.model.max_seq_len, "prediction")
            predicted = context.lm.encode(text, add_special_tokens=False)
            more["draft"] = Speculator(PredictedOutput(predicted))
        return Prompts((body.chat_request(context, template_form(body.messages), body.reasoning_effort, **more),))

    def answer(self, body: ParsedBody, completions: Sequence[Completion]) -> dict[str, Any]:
        answer = super().answer(body, completions)
        if body.values.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(body.requests[0], completions[0], body.tokenizer)
        return answer

    def choice(self, body: ParsedBody, at: int, completion: Completion, text: Completion) -> dict[str, Any]:
        logprobs = None
        if text.logprobs is not None:
            tokens = token_texts(text.token_ids, text.logprobs, body.requests[at].prompt, body.tokenizer)
            logprobs = {"content": logprob_entries(tokens, text.token_ids, text.logprobs), "refusal": None}
        assert text.message is not None, "a chat's text is parsed as a message"
        message = text.message.to_dict()
        if text.message.reasoning is not None:
            message |= dict.fromkeys(_REASONING, text.message.reasoning)
        if body.values.functions:
            message = _with_function_call(message)
        return {"message": message | {"refusal": None}, "logprobs": logprobs}

    def finish_reason(self, body: ParsedBody, text: Completion) -> str:
        reason = super().finish_reason(body, text)
        return "function_call" if body.values.functions and reason == "tool_calls" else reason

    def stream_of(self, body: ParsedBody) -> type[ChoiceStream]:
        return _FunctionStream if body.values.functions else _ChatStream
