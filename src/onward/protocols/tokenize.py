"""/tokenize and /detokenize, which convert between text and token ids, and /v1/messages/count_tokens."""

import time
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationInfo, model_validator

from onward.chat import PROMPT_ENDINGS, read_tool_use
from onward.errors import OnwardError, RequestError
from onward.language_model.request import checked_ids
from onward.protocols import BodyReader
from onward.protocols.body import AtMost, Body, BodyError, FieldError, Validation, expected, validated, validation_of
from onward.protocols.chat import TemplateVariables, template_variables
from onward.protocols.chat_fields import Message, template_form
from onward.protocols.messages import CountBody
from onward.protocols.protocol import LAST_SECOND, NAMED_ERRORS, ModelContext, ResponseKey, named_error


class TokenizeBody(Body):
    """A body of /tokenize: a text or a chat. created: time for the chat template, in seconds since 1970."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})
    model: str | None = None
    prompt: Annotated[str | None, AtMost("text_characters", "characters")] = None
    messages: Annotated[list[Message] | None, FailFast(), AtMost("messages", "messages")] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables = None
    created: Annotated[int | None, Field(ge=0, le=LAST_SECOND)] = None

    @model_validator(mode="after")
    def _check_combinations(self, info: ValidationInfo) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("and messages exclude each other: give one of them", at="prompt")
        characters = sum(len(each.get("content") or "") for each in self.messages or ())
        limit = validation_of(info).limits.text_characters
        if characters > limit:
            raise FieldError(f"have {characters} characters; this server allows at most {limit}", at="messages")
        of_chats = (*PROMPT_ENDINGS, "chat_template_kwargs", "created")
        kind, others = ("prompt", of_chats) if self.messages is None else ("messages", ("add_special_tokens",))
        for name in others:
            if getattr(self, name) is not None:
                raise FieldError(f"cannot be combined with {kind}: remove it", at=name)
        return self


class DetokenizeBody(Body):
    """A body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast(), expected("a list of ids"), AtMost("ids", "ids")]


class Tokens(BaseModel):
    """A response of /tokenize. created: of chats."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    created: int | None = None


class Text(BaseModel):
    """A response of /detokenize."""

    prompt: str


def tokenized(reader: BodyReader, fields: dict[str, Any]) -> dict[str, Any]:
    """The response to a body of /tokenize. Raises `BodyError`."""
    body, lm = validated(TokenizeBody, fields, Validation(reader.limits)), reader.lm
    more: dict[str, Any] = {}
    try:
        if body.messages is None:
            tokens = lm.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        else:
            more["created"] = int(time.time()) if body.created is None else body.created
            variables = {**reader.variables, **template_variables(lm, body.chat_template_kwargs or {})}
            variables |= {name: getattr(body, name) for name in PROMPT_ENDINGS}
            tokens = lm.chat_prompt(template_form(body.messages), variables, ResponseKey.new(more["created"]).time)
    except BodyError:
        raise
    except NAMED_ERRORS as error:
        option = error.option if isinstance(error, RequestError) and error.option in PROMPT_ENDINGS else None
        raise BodyError(str(error), option or ("prompt" if body.messages is None else "messages")) from error
    return {"tokens": tokens, "count": len(tokens), "max_model_len": lm.model.max_seq_len, **more}


def detokenized(reader: BodyReader, fields: dict[str, Any]) -> dict[str, Any]:
    """The response to a body of /detokenize. Raises `BodyError`."""
    body, lm = validated(DetokenizeBody, fields, Validation(reader.limits)), reader.lm
    try:
        return {"prompt": lm.decode(checked_ids(body.tokens, lm.model.vocab_size)) if body.tokens else ""}
    except OnwardError as error:
        raise BodyError(str(error), "tokens") from error


class TokenCount(BaseModel):
    """A response of /v1/messages/count_tokens."""

    input_tokens: int


def counted(reader: BodyReader, fields: dict[str, Any]) -> dict[str, Any]:
    """The response to a body of /v1/messages/count_tokens. The prompt may be longer than the context. Raises
    `BodyError`."""
    body = validated(CountBody, fields, Validation(reader.limits, reader.ignore_unsupported))
    characters, limit = _characters([body.system, body.messages, body.tools]), reader.limits.text_characters
    if characters > limit:
        message = f"messages, system and tools have {characters} characters; this server allows at most {limit}"
        raise BodyError(message, "messages")
    try:
        return {"input_tokens": len(_prompt(reader, body))}
    except NAMED_ERRORS as error:
        raise named_error(error, body) from error


def _prompt(reader: BodyReader, body: CountBody) -> list[int]:
    """The prompt's ids."""
    lm, options = reader.lm, body.chat_options()
    context = body.with_variables(ModelContext(lm, {}, reader.variables, ResponseKey.new().time))
    variables = {**context.variables, **template_variables(lm, body.chat_template_kwargs or {})}
    use = read_tool_use(*(options.pop(name, None) for name in ("tools", "tool_choice", "parallel_tool_calls")))
    if use.tools and use.choice != "none":
        variables = {"tools": [tool.function for tool in use.tools], **variables}
    return lm.chat_prompt(body.conversation, {**variables, **options}, context.now)  # how the prompt ends is left


def _characters(value: Any) -> int:
    """The number of characters of all texts in a value."""
    count, left = 0, [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            count += len(each)
        elif isinstance(each, dict):
            left += each.values()
            left += each
        elif isinstance(each, list):
            left += each
    return count
