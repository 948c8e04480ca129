"""Read calls that are JSON objects, and calls whose arguments are separate and become JSON here."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from onward.chat.source import MessageBuilder, Reading, TextReader, read_string, read_value
from onward.schemas import kind_of, kinds_of

# "parameters" is Llama's name.
_ARGUMENTS = ("arguments", "parameters")


def read_call_object(source: TextReader, message: MessageBuilder, *, known: bool = False) -> Reading[bool]:
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


def read_call_objects(
    source: TextReader, message: MessageBuilder, separator: str = "", *, known: bool = False
) -> Reading[bool]:
    """Read calls with whitespace and a separator between them. known: as in `read_call_object`.

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
        if not (yield from read_call_object(source, message, known=known)):
            if found:
                source.rewind()
            return found
        found = True
        yield from source.skip_space()
        if separator and not (yield from source.skip(separator)):
            return True


# Literals that models write, also Python's.
_LITERALS = {"true": "true", "false": "false", "none": "null", "null": "null"}


class Arguments:
    """Writes the arguments of the last call as one JSON object, in their order.

    schema: of that object. It tells strings from other values; if it does not, valid JSON is JSON, and all other text
    is a string.
    """

    def __init__(self, message: MessageBuilder, schema: Mapping[str, Any]) -> None:
        self._message, self._schema = message, schema
        self._before = "{"

    def read(self, name: str, source: TextReader, ends: list[str]) -> Reading[bool]:
        """Read a value through one of `ends`, and stream strings; return whether the value is complete."""
        self._message.arguments(f"{self._before}{_dumped(name)}: ")
        self._before = ", "
        kinds = kinds_of(self._schema.get("properties", {}).get(name, {}), self._schema)
        if kinds == {"string"}:
            self._message.arguments('"')
            found = yield from source.until(
                ends, lambda text: self._message.arguments(_dumped(text)[1:-1]), is_cut=lambda: True
            )
            if found is not None:
                self._message.arguments('"')
        else:
            parts: list[str] = []
            found = yield from source.until(ends, parts.append)
            if found is not None:
                self._message.arguments(_as_json("".join(parts), kinds))
        return found is not None

    def end(self) -> None:
        self._message.arguments("{}" if self._before == "{" else "}")


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
