"""Calls that are JSON objects with a name and arguments, as most families write them; and calls whose arguments stand
each by itself between marks, and become JSON here."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from onward.chat.source import MessageBuilder, Reading, TextReader, read_string, read_value
from onward.schemas import kind_of, kinds_of

# Llama calls them parameters.
_ARGUMENTS = ("arguments", "parameters")


def read_call_object(source: TextReader, written: MessageBuilder, *, known: bool = False) -> Reading[bool]:
    """Read {"name": …, "arguments": …}, its keys in any order; others are passed over.

    The call begins as soon as its name was read. From there on the text is its own, and the source never goes back.

    known: the name must be that of a tool that was given.

    Returns:
        Whether there was a name. If not, the source stands anywhere.
    """
    if not (yield from source.skip("{")):
        return False
    name: str | None = None
    early: list[str] = []  # arguments that stand before the name
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
            if not name or (known and not written.knows(name)):
                return False
            source.forget()
            written.call(name)
            written.arguments("".join(early))
            whole = True
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            whole = yield from read_value(source, early.append if name is None else written.arguments)
        else:
            whole = yield from read_value(source, len)
        if not whole:
            return name is not None
        yield from source.skip_space()
        if (yield from source.skip("}")):
            if name is not None and not has_arguments:
                written.arguments("{}")
            return name is not None
        if not (yield from source.skip(",")):
            return name is not None


def read_call_objects(
    source: TextReader, written: MessageBuilder, separator: str = "", *, known: bool = False
) -> Reading[bool]:
    """Read one call after another, with spaces and a separator between them. known: as in `read_call_object`.

    Returns:
        Whether there was one. What comes after the last whole call is unread, and so is what breaks a call off.
    """
    found = False
    while True:
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            return found
        if found:
            source.mark()
        if not (yield from read_call_object(source, written, known=known)):
            if found:
                source.rewind()
            return found
        found = True
        yield from source.skip_space()
        if separator and not (yield from source.skip(separator)):
            return True


# What models write that were shown Python's words for the same.
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}


class Arguments:
    """Writes the arguments of a call that has begun as one object of JSON, in the order in which they come.

    schema: of that object. It tells what is text and what a number, a list or an object; where it does not, what reads
    as JSON is JSON, and the rest is text.
    """

    def __init__(self, written: MessageBuilder, schema: Mapping[str, Any]) -> None:
        self._written, self._schema = written, schema
        self._before = "{"

    def read(self, name: str, source: TextReader, ends: list[str]) -> Reading[bool]:
        """Read a value up to and with one of `ends`. Text is handed on as it comes. Returns whether it is whole."""
        self._written.arguments(f"{self._before}{_dumped(name)}: ")
        self._before = ", "
        kinds = kinds_of(self._schema.get("properties", {}).get(name, {}), self._schema)
        if kinds == {"string"}:
            self._written.arguments('"')
            found = yield from source.until(
                ends, lambda text: self._written.arguments(_dumped(text)[1:-1]), is_cut=lambda: True
            )
            if found is not None:
                self._written.arguments('"')
        else:
            parts: list[str] = []
            found = yield from source.until(ends, parts.append)
            if found is not None:
                self._written.arguments(_as_json("".join(parts), kinds))
        return found is not None

    def end(self) -> None:
        """No more follow."""
        self._written.arguments("{}" if self._before == "{" else "}")


def _as_json(text: str, kinds: set[str] | None) -> str:
    """A value as JSON: as it was written, where that is JSON of one of these types, or else as text."""
    value = _WORDS.get(text.strip().lower(), text.strip())
    try:
        kind = kind_of(json.loads(value, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return _dumped(text)
    fits = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    return value if fits else _dumped(text)


def _dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
