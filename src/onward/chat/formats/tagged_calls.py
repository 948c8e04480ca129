r"""Formats whose arguments are separate, between tags; they become one JSON object here.

glm           <tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>
glm-4.7       <tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>
qwen3-coder   <tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>
"""

import json
import re
from collections.abc import Sequence
from typing import ClassVar, NoReturn, final

from onward.chat.format import ArgumentSyntax, CallSyntax, MessageFormat
from onward.chat.source import MessageBuilder, Reading, TextReader
from onward.schemas import kind_of, kinds_of

_TOOL_CALL_END = "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
# Literals that models write, also Python's.
_LITERALS = {"true": "true", "false": "false", "none": "null", "null": "null"}


class _TaggedFormat(MessageFormat):
    """key: begins an argument. ends: of values, the longest first. closing: the mark after the last argument."""

    openers = ("<tool_call>",)
    key: ClassVar[str]
    ends: ClassVar[Sequence[str]]
    closing: ClassVar[str]

    def read_key(self, source: TextReader) -> Reading[str | None]:
        """Read the name of an argument, and the text up to its value; None if the text is cut."""
        raise NotImplementedError

    def read_arguments(self, name: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        """Begin a call, and read its arguments in their order. Returns whether they end with the closing mark.

        The schema of the tool tells strings, which are streamed, from other values. Without it, valid JSON is JSON, and
        all other text is a string.
        """
        source.forget()
        message.call(name)
        schema, before = message.schema(name), "{"
        yield from source.skip_space()
        while (yield from source.skip(self.key)):
            key = yield from self.read_key(source)
            if key is None:
                return False
            message.arguments(f"{before}{_dumped(key)}: ")
            before = ", "
            kinds = kinds_of(schema.get("properties", {}).get(key, {}), schema)
            if not (yield from self._read_value(source, message, kinds)):
                return False
            yield from source.skip_space()
        whole = yield from source.skip(self.closing)
        if not whole and source.is_cut([self.key, self.closing]):
            yield from source.close(self.key, self.closing)
            return False
        message.arguments("{}" if before == "{" else "}")
        return True

    def _read_value(self, source: TextReader, message: MessageBuilder, kinds: set[str] | None) -> Reading[bool]:
        """Read a value through its end; return whether it is complete."""
        if kinds == {"string"}:
            message.arguments('"')
            end = yield from source.until(
                self.ends, lambda text: message.arguments(_dumped(text)[1:-1]), is_cut=lambda: True
            )
            message.arguments("" if end is None else '"')
        else:
            parts: list[str] = []
            end = yield from source.until(self.ends, parts.append)
            message.arguments("" if end is None else _as_json("".join(parts), kinds))
        return end is not None


class Glm(_TaggedFormat):
    """GLM-4.5: each mark is on its own line. Reads the layout of GLM-4.7, too."""

    name = "glm"
    key, ends, closing = _KEY, (_VALUE_END,), _TOOL_CALL_END
    marks = (_TOOL_CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    # Whitespace around a key is layout.
    keys = re.compile(rf"(?!.*{_KEY_END})\S(.*\S)?", re.DOTALL)
    syntax = CallSyntax(
        "",
        "\n",
        _TOOL_CALL_END,
        "\n<tool_call>",
        argument=ArgumentSyntax(_KEY, f"{_KEY_END}\n{_VALUE}", f"{_VALUE_END}\n", keys),
    )

    def is_of(self, template: str) -> bool:
        return _KEY in template and f"{_KEY_END}{_VALUE}" not in template

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        yield from source.skip_space()
        name = yield from source.word(re.compile(r"[\w.-]*"))
        yield from source.skip_space()
        # A call of a function without parameters is only a name.
        if not name or (yield from source.peek()) != "<":
            return False
        yield from self.read_arguments(name, source, message)
        return True

    def read_key(self, source: TextReader) -> Reading[str | None]:
        key: list[str] = []
        if (yield from source.until([_KEY_END], key.append)) is None:
            return None
        yield from source.skip_space()
        return "".join(key).strip() if (yield from source.close(_VALUE)) else None


@final
class LaterGlm(Glm):
    """GLM-4.7: a call is one line."""

    name = "glm-4.7"
    syntax = CallSyntax(
        "",
        "",
        _TOOL_CALL_END,
        "<tool_call>",
        argument=ArgumentSyntax(_KEY, f"{_KEY_END}{_VALUE}", _VALUE_END, Glm.keys),
    )

    def is_of(self, template: str) -> bool:
        return f"{_KEY_END}{_VALUE}" in template


@final
class Qwen3Coder(_TaggedFormat):
    """Qwen3-Coder, and Qwen 3.5 and later."""

    name = "qwen3-coder"
    key, ends, closing = _PARAMETER, ("\n</parameter>", "</parameter>"), "</function>"
    marks = (_TOOL_CALL_END,)
    keys = re.compile(r"[^\n<>]*")
    syntax = CallSyntax(
        f"\n{_FUNCTION}",
        ">\n",
        f"{closing}\n{_TOOL_CALL_END}",
        "\n<tool_call>",
        argument=ArgumentSyntax(_PARAMETER, ">\n", "\n</parameter>\n", keys),
    )

    def is_of(self, template: str) -> bool:
        return "<tool_call>" in template and _FUNCTION in template

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        yield from source.skip_space()
        if not (yield from source.skip(_FUNCTION)):
            return False
        name = yield from source.word(re.compile(r"[^\s<>]*"))
        if not (yield from source.skip(">")) or not name:
            return False
        if (yield from self.read_arguments(name, source, message)):
            yield from source.skip_space()
            yield from source.close(_TOOL_CALL_END)
        return True

    def read_key(self, source: TextReader) -> Reading[str | None]:
        key = yield from source.word(self.keys)
        if not (yield from source.skip(">")):
            if source.is_over:
                return None
            key = ""  # the mark does not end
        yield from source.skip("\n")
        return key


def _as_json(text: str, kinds: set[str] | None) -> str:
    """Return a value as JSON: unchanged if it is JSON of one of these types, else as a string."""
    value = _LITERALS.get(text.strip().lower(), text.strip())
    try:
        kind = kind_of(json.loads(value, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return _dumped(text)
    fits = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    return value if fits else _dumped(text)


def _dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
