"""Calls whose arguments stand each by itself, between marks, and not as JSON. They become JSON here."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from onward.messages.source import Reading, Source
from onward.messages.written import Written
from onward.schemas import kind_of, kinds_of

# What models write that were shown Python's words for the same.
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}


class Arguments:
    """Writes the arguments of a call that has begun as one object of JSON, in the order in which they come.

    schema: of that object. It tells what is text and what a number, a list or an object; where it does not, what reads
    as JSON is JSON, and the rest is text.
    """

    def __init__(self, written: Written, schema: Mapping[str, Any]) -> None:
        self._written, self._schema = written, schema
        self._before = "{"

    def read(self, name: str, source: Source, ends: list[str]) -> Reading[bool]:
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
