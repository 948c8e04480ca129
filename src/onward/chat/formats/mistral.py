"""The formats of Mistral's models, the earlier and the later one. Their ids have 9 characters.

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


class _AnyMistral(MessageFormat):
    """Reads both formats; a model of either is told by its template."""

    thinking = ("[THINK]", "[/THINK]")
    openers = ("[TOOL_CALLS]",)
    marks = (_ID, _ARGUMENTS)

    def read_calls(self, opener: str, source: TextReader, written: MessageBuilder) -> Reading[bool]:
        yield from source.skip_space()
        first = yield from source.peek()
        if first == "{":
            return (yield from read_call_objects(source, written, separator=","))
        if first != "[":
            return (yield from _read_named_call(source, written))
        yield from source.skip("[")
        if not (yield from read_call_objects(source, written, separator=",")):
            return False
        yield from source.skip_space()
        yield from source.skip("]")
        return True

    def call_id(self, digest: bytes) -> str:
        return letters(digest, 9)


@final
class Mistral(_AnyMistral):
    """Its calls are a list of objects."""

    name = "mistral"
    syntax = CallSyntax('{"name": ', ', "arguments": ', "}", ", ", begin="[", end="]", quoted=True)

    def is_of(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template and _ARGUMENTS not in template


@final
class LaterMistral(_AnyMistral):
    """Its calls are a name and arguments each."""

    name = "mistral-args"
    syntax = CallSyntax("", _ARGUMENTS, "", "[TOOL_CALLS]")

    def is_of(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template and _ARGUMENTS in template


def _read_named_call(source: TextReader, written: MessageBuilder) -> Reading[bool]:
    """Read a name and its arguments, with or without an id and a mark between them."""
    name: list[str] = []
    id: list[str] = []
    yield from source.take(_NAME, name.append)
    yield from source.skip_space()
    if (yield from source.skip(_ID)):
        yield from source.take(_NAME, id.append)
    marked = yield from source.skip(_ARGUMENTS)
    yield from source.skip_space()
    if not name or not (marked or (yield from source.peek()) == "{"):
        return False
    source.forget()
    written.call("".join(name), "".join(id) or None)
    yield from read_value(source, written.arguments)
    return True
