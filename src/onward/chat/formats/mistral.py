"""The earlier and the later format of Mistral's models. Their call ids have 9 characters.

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": …}]
[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]weather[ARGS]{"city": "Bergen"}
"""

import re
from typing import final

from onward.chat.calls import read_call_objects
from onward.chat.format import CallSyntax, MessageFormat, letters
from onward.chat.source import MessageBuilder, Reading, TextReader, read_value

_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.-]*")


class Mistral(MessageFormat):
    """Calls are a list of objects. Reads the later format, too."""

    name = "mistral"
    thinking = ("[THINK]", "[/THINK]")
    openers = ("[TOOL_CALLS]",)
    marks = (_ID, _ARGUMENTS)
    syntax = CallSyntax('{"name": ', ', "arguments": ', "}", ", ", begin="[", end="]", quoted=True)

    def is_of(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template and _ARGUMENTS not in template

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        yield from source.skip_space()
        first = yield from source.peek()
        if first == "{":
            return (yield from read_call_objects(source, message, separator=","))
        if first != "[":
            return (yield from _read_named_call(source, message))
        yield from source.skip("[")
        if not (yield from read_call_objects(source, message, separator=",")):
            return False
        yield from source.skip_space()
        yield from source.skip("]")
        return True

    def call_id(self, digest: bytes) -> str:
        return letters(digest, 9)


@final
class LaterMistral(Mistral):
    """A call is a name, a mark and the arguments."""

    name = "mistral-args"
    syntax = CallSyntax("", _ARGUMENTS, "", "[TOOL_CALLS]")

    def is_of(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template and _ARGUMENTS in template


def _read_named_call(source: TextReader, message: MessageBuilder) -> Reading[bool]:
    """Read a name and arguments, with an optional id and mark between them."""
    id = None
    name = yield from source.word(_NAME)
    yield from source.skip_space()
    if (yield from source.skip(_ID)):
        id = yield from source.word(_NAME)
    marked = yield from source.skip(_ARGUMENTS)
    yield from source.skip_space()
    if not name or not (marked or (yield from source.peek()) == "{"):
        return False
    source.forget()
    message.call(name, id)
    yield from read_value(source, message.arguments)
    return True
