r"""Formats whose calls are JSON objects, or a name and a JSON object.

hermes         <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>
mistral        [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": …}]
mistral-args   [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]weather[ARGS]{"city": "Bergen"}
llama3         {"name": "weather", "parameters": {"city": "Oslo"}}; {"name": …}
               <|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}
"""

import re
from typing import final

from onward.chat.format import CallSyntax, MessageFormat, letters
from onward.chat.source import MessageBuilder, Reading, TextReader, read_string, read_value

_CLOSING = "</tool_call>"
# Marks of other families with Hermes' opener.
_OTHERS = ("<function=", "<arg_key>")
_ID, _ARGS = "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.-]*")
# "parameters" is Llama's name.
_ARGUMENTS = ("arguments", "parameters")


@final
class Hermes(MessageFormat):
    """Hermes, Qwen 2.5, QwQ and Qwen 3."""

    name = "hermes"
    openers = ("<tool_call>",)
    marks = (_CLOSING,)
    syntax = CallSyntax('\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n<tool_call>", quoted=True)

    def is_of(self, template: str) -> bool:
        return "<tool_call>" in template and not any(other in template for other in _OTHERS)

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        if not (yield from _read_call_objects(source, message)):
            return False
        yield from source.skip_space()
        yield from source.close(_CLOSING)
        return True


class Mistral(MessageFormat):
    """Earlier models of Mistral: calls are a list of objects, and their ids have 9 characters. Reads the later format,
    too."""

    name = "mistral"
    thinking = ("[THINK]", "[/THINK]")
    openers = ("[TOOL_CALLS]",)
    marks = (_ID, _ARGS)
    syntax = CallSyntax('{"name": ', ', "arguments": ', "}", ", ", begin="[", end="]", quoted=True)

    def is_of(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template and _ARGS not in template

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        yield from source.skip_space()
        first = yield from source.peek()
        if first == "{":
            return (yield from _read_call_objects(source, message, separator=","))
        if first != "[":
            return (yield from _read_named_call(source, message))
        yield from source.skip("[")
        if not (yield from _read_call_objects(source, message, separator=",")):
            return False
        yield from source.skip_space()
        yield from source.skip("]")
        return True

    def call_id(self, digest: bytes) -> str:
        return letters(digest, 9)


@final
class LaterMistral(Mistral):
    """Later models of Mistral: a call is a name, a mark and the arguments."""

    name = "mistral-args"
    syntax = CallSyntax("", _ARGS, "", "[TOOL_CALLS]")

    def is_of(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template and _ARGS in template


def _read_named_call(source: TextReader, message: MessageBuilder) -> Reading[bool]:
    """Read a name and arguments, with an optional id and mark between them."""
    id = None
    name = yield from source.word(_NAME)
    yield from source.skip_space()
    if (yield from source.skip(_ID)):
        id = yield from source.word(_NAME)
    marked = yield from source.skip(_ARGS)
    yield from source.skip_space()
    if not name or not (marked or (yield from source.peek()) == "{"):
        return False
    source.forget()
    message.call(name, id)
    yield from read_value(source, message.arguments)
    return True


@final
class Llama3(MessageFormat):
    """Llama 3.1, 3.2 and 3.3: a call may be without an opener."""

    name = "llama3"
    openers = ("<|python_tag|>",)
    bare = True
    syntax = CallSyntax('{"name": ', ', "parameters": ', "}", "; ", quoted=True)

    def is_of(self, template: str) -> bool:
        return "<|start_header_id|>" in template and ("<|python_tag|>" in template or '"parameters"' in template)

    def read_start(self, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        # Other objects are answers in JSON, not calls.
        return (yield from _read_call_objects(source, message, separator=";", known=True))

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        # The mark also opens code, which is content.
        return (yield from _read_call_objects(source, message, separator=";"))


def _read_call_object(source: TextReader, message: MessageBuilder, *, known: bool = False) -> Reading[bool]:
    """Read {"name": …, "arguments": …} with keys in any order; other keys are ignored.

    The call begins once its name is read. From there on, the source is never rewound.

    known: accept only names of the request's tools.

    Returns:
        Whether a name was read. If not, the position of the source is undefined.
    """
    if not (yield from source.skip("{")):
        return False
    name: str | None = None
    early: list[str] = []  # arguments before the name
    has_arguments = False
    while True:
        yield from source.skip_space()
        key = yield from read_string(source)
        yield from source.skip_space()
        if key is None or not (yield from source.skip(":")):
            return name is not None
        yield from source.skip_space()
        if key == "name" and name is None:
            name = yield from read_string(source)
            if not name or (known and not message.knows(name)):
                return False
            source.forget()
            message.call(name)
            message.arguments("".join(early))
            complete = True
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            complete = yield from read_value(source, early.append if name is None else message.arguments)
        else:
            complete = yield from read_value(source, len)
        if not complete:
            return name is not None
        yield from source.skip_space()
        if (yield from source.skip("}")):
            if name is not None and not has_arguments:
                message.arguments("{}")
            return name is not None
        if not (yield from source.skip(",")):
            return name is not None


def _read_call_objects(
    source: TextReader, message: MessageBuilder, separator: str = "", *, known: bool = False
) -> Reading[bool]:
    """Read calls with whitespace and a separator between them. known: as in `_read_call_object`.

    Returns:
        Whether there was a call. The text after the last complete call stays unread.
    """
    found = False
    while True:
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            return found
        if found:
            source.mark()
        if not (yield from _read_call_object(source, message, known=known)):
            if found:
                source.rewind()
            return found
        found = True
        yield from source.skip_space()
        if separator and not (yield from source.skip(separator)):
            return True
