"""Calls whose arguments stand each by itself, between marks, and not as JSON. They become JSON here."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from onward.messages.source import Reading, Source
from onward.messages.written import Written

# What models write that were shown Python's words for the same.
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_MOST_REFERENCES = 16


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
            found = yield from source.until(ends, lambda text: self._written.arguments(_dumped(text)[1:-1]))
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


def alternatives(schema: Any, root: Mapping[str, Any], references: int = 0) -> list[Mapping[str, Any]]:
    """The schemas of which a value has to meet one, without references and unions. root: what references name."""
    if not isinstance(schema, Mapping) or references > _MOST_REFERENCES:
        return [{}]
    if isinstance(schema.get("$ref"), str):
        return alternatives(_referred(schema["$ref"], root), root, references + 1)
    each = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(each, list):
        return [leaf for one in each for leaf in alternatives(one, root, references + 1)]
    return [schema]


def kinds_of(schema: Any, root: Mapping[str, Any]) -> set[str] | None:
    """JSON's names of the types that a schema allows; None where it does not tell. root: what its references name."""
    kinds: set[str] = set()
    for leaf in alternatives(schema, root):
        if "enum" in leaf or "const" in leaf:
            kinds |= {_kind(value) for value in values_of(leaf) or ()}
        elif "type" in leaf:
            kinds |= {leaf["type"]} if isinstance(leaf["type"], str) else set(leaf["type"])
        else:
            return None
    return kinds


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values that a schema allows, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    if schema.get("type") == "null":
        return [None]
    return list(schema["enum"]) if "enum" in schema else None


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    at: Any = root
    for part in reference.removeprefix("#/").split("/"):
        at = at.get(part) if isinstance(at, Mapping) else None
    return at


def _as_json(text: str, kinds: set[str] | None) -> str:
    """A value as JSON: as it was written, where that is JSON of one of these types, or else as text."""
    value = _WORDS.get(text.strip().lower(), text.strip())
    try:
        kind = _kind(json.loads(value, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return _dumped(text)
    fits = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    return value if fits else _dumped(text)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds: list[tuple[type, str]] = [
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ]
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
