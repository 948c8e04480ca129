"""The subschemas, types and values of a schema, with its references resolved."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

MISSING = object()
# Keywords whose values are a schema, a list of schemas, and schemas by name.
ONE = (
    *("additionalProperties", "additionalItems", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def resolve(reference: str, root: Any) -> Any:
    """The subschema at a JSON pointer such as "#/$defs/Unit"; `MISSING` if there is none."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return MISSING
    at: Any = root
    for part in unquote(reference[2:]).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping) and key in at:
            at = at[key]
        elif isinstance(at, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(at):
            at = at[int(key)]
        else:
            return MISSING
    return at


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The schemas in a schema's keywords, each with its keyword and its place within the schema."""
    for key, value in schema.items():
        if key in MAPS:
            yield from ((key, f"{key}.{name}", each) for name, each in value.items())
        elif key in LISTS or (key == "items" and isinstance(value, list)):
            yield from ((key, f"{key}[{number}]", each) for number, each in enumerate(value))
        elif key in ONE:
            yield key, key, value


def reachable(schema: Any, root: Any) -> Iterator[tuple[Mapping[str, Any], list[Any]]]:
    """Every schema that is reachable from one, itself included, each with the schemas that it leads to directly.
    Definitions count if something refers to them. root: the document of references."""
    waiting, seen = [schema], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or not isinstance(one, Mapping):
            continue
        seen.add(id(one))
        inner = [each for key, _, each in children(one) if key not in ("$defs", "definitions")]
        if isinstance(one.get("$ref"), str):
            inner.append(resolve(one["$ref"], root))
        waiting += inner
        yield one, inner


def alternatives(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """The schemas, without references and unions, of which a value must match one. root: the document of references.

    Every subschema is visited once, so the time is linear in the size of the document. A schema that leads only to
    itself allows anything, and so does a reference to another document.
    """
    leaves: list[Mapping[str, Any]] = []
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        if not isinstance(one, Mapping):
            leaves.append({})
            continue
        seen.add(id(one))
        each = one.get("anyOf") or one.get("oneOf")
        if isinstance(one.get("$ref"), str):
            waiting.append(resolve(one["$ref"], root))
        elif isinstance(each, list):
            waiting += reversed(each)
        else:
            leaves.append(one)
    return leaves or [{}]


def kinds_of(schema: Any, root: Any) -> set[str] | None:
    """JSON's names of the types that a schema allows; None if it allows all. root: as for `alternatives`."""
    kinds: set[str] = set()
    for leaf in alternatives(schema, root):
        if "enum" in leaf or "const" in leaf:
            kinds |= {kind_of(value) for value in values_of(leaf) or ()}
        elif "type" in leaf:
            kinds |= {leaf["type"]} if isinstance(leaf["type"], str) else set(leaf["type"])
        else:
            return None
    return kinds


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema allows, if it lists them."""
    if "const" in schema:
        return [schema["const"]]
    if schema.get("type") == "null":
        return [None]
    return list(schema["enum"]) if "enum" in schema else None


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    return values_of({key: schema[key] for key in ("const", "enum") if key in schema})


def are_disjoint(branches: Sequence[Any], root: Any) -> bool:
    """Whether no value matches two of several schemas."""
    values_of_each = [listed_values(branch) if isinstance(branch, Mapping) else None for branch in branches]
    if None not in values_of_each:
        values = [value for each in values_of_each for value in each or ()]
        return not any(json_equal(one, other) for at, one in enumerate(values) for other in values[:at])
    all_kinds: list[str] = []
    for branch in branches:
        kinds = kinds_of(branch, root)
        if kinds is None:
            return False
        all_kinds += {"number" if kind == "integer" else kind for kind in kinds}
    return len(all_kinds) == len(set(all_kinds))


def json_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where true is not a number."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


def kind_of(value: Any) -> str:
    """JSON's name of a value's type; a whole number is an integer."""
    if value is None:
        return "null"
    return next((name for kind, name in _KINDS.items() if isinstance(value, kind)), "object")
