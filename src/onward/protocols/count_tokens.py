"""/v1/messages/count_tokens: the length of the prompt that a message would have."""

from typing import Any

from pydantic import BaseModel

from onward.chat.tools import read_tool_use
from onward.protocols import BodyReader
from onward.protocols.body import BodyError, Validation, validated
from onward.protocols.chat import template_variables
from onward.protocols.messages import CountBody
from onward.protocols.protocol import NAMED_ERRORS, ModelContext, ResponseKey, named_error


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
    context = body.with_variables(ModelContext(lm, reader.model, {}, reader.variables, ResponseKey.new().time))
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
