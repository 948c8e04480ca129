"""Validation of schemas: every keyword has a value of the type that JSON Schema requires.

The rules are those of the metaschema of draft 2020-12, and of earlier drafts, for keywords that Onward or llguidance
read. Schemas are checked first, so that later code can rely on their form.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from onward.errors import OptionError
from onward.schemas.numbers import BOUNDS, bound_within
from onward.schemas.references import LISTS, MAPS, MISSING, ONE, children, resolve

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_TEXTS = ("$ref", "format", "pattern")
_BOUNDS = ("minimum", "maximum")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_MINIMA = ("minLength", "minItems", "minProperties", "minContains")
_MAXIMA = ("maxLength", "maxItems", "maxProperties", "maxContains")
# Annotations with arbitrary values, including numbers of any size.
_EXAMPLES = ("default", "example", "examples")
# More characters, items or properties than any text has.
_UNREACHABLE = 2**31


def check_schema(schema: Any, at: str) -> None:
    """Check the form of a schema. at: its place, for errors.

    Raises:
        RequestError: a keyword whose value has the wrong type, or a reference to nothing, with its place.
    """
    waiting, places = [(schema, at)], {}
    parents: dict[int, list[int]] = {}  # of schemas that replace them
    met = []
    while waiting:
        one, place = waiting.pop()
        if id(one) in places:
            continue
        places[id(one)] = place
        in_place: Sequence[Any] = ()
        if not isinstance(one, bool):
            _check_keywords(one, place)
            in_place = one.get("anyOf") or one.get("oneOf") or ()
            waiting += [(each, f"{place}.{inner}") for _, inner, each in children(one)]
            if one.get("$ref", "") == "#" or one.get("$ref", "").startswith("#/"):
                in_place = [_target(one["$ref"], schema, place)]
                waiting.append((in_place[0], f"{place}.$ref"))
        if not in_place:
            met.append(id(one))
        for each in in_place:
            parents.setdefault(id(each), []).append(id(one))
    while met:
        one_id = met.pop()
        if places.pop(one_id, None) is not None:
            met += parents.get(one_id, ())
    if places:
        raise OptionError(min(places.values(), key=len), "refers to itself alone, so no value can match it")


def _check_keywords(schema: Any, at: str) -> None:
    if not isinstance(schema, Mapping):
        _refuse(at, "a JSON Schema: an object, true or false", schema)
    if not all(isinstance(key, str) for key in schema):
        _refuse(at, "an object whose keys are strings", schema)
    for keyword in schema:
        is_valid, expected = _CHECKS.get(keyword, (None, ""))
        if is_valid is not None and not is_valid(schema[keyword]):
            _refuse(f"{at}.{keyword}", expected, schema[keyword])


def _target(reference: str, root: Any, at: str) -> Any:
    """The schema that a reference within the document refers to."""
    target = resolve(reference, root)
    if not isinstance(target, Mapping | bool):
        raise OptionError(
            f"{at}.$ref",
            f"refers to {reference!r}, and there is {'nothing' if target is MISSING else 'no schema'} there",
        )
    return target


def normalized(schema: Any, at: str) -> Any:
    """A schema whose numbers llguidance reads exactly.

    Lengths such as 3.0 become integers. Maxima that no text reaches are dropped, and so are defaults and examples.
    Bounds have at most 15 digits, or are integers.

    Raises:
        RequestError: a minimum that no text reaches, with its place.
    """
    if isinstance(schema, list):
        return [normalized(one, f"{at}[{number}]") for number, one in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        place = f"{at}.{key}"
        if key in _EXAMPLES:
            continue
        if key in MAPS:
            changed[key] = {name: normalized(each, f"{place}.{name}") for name, each in value.items()}
        elif key in LISTS or key in ONE:
            changed[key] = normalized(value, place)
        elif key in _MINIMA and value >= _UNREACHABLE:
            raise OptionError(place, f"is {_brief(value)}, which no text reaches: make it smaller")
        elif key in _MINIMA or (key in _MAXIMA and value < _UNREACHABLE):
            changed[key] = int(value)
        elif key in BOUNDS and not isinstance(value, bool):
            changed[key] = bound_within(key, value)
        elif key not in _MAXIMA:
            changed[key] = value
    return changed


def _refuse(at: str, expected: str, got: Any) -> NoReturn:
    raise OptionError(at, f"must be {expected}; got {_brief(got)}")


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with more digits than Python prints
        return f"a {type(value).__name__}"
    return text if len(text) <= 100 else text[:99] + "…"


def _is_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_type(value: Any) -> bool:
    several = value if isinstance(value, list) else [value]
    return bool(several) and all(isinstance(one, str) and one in _TYPES for one in several)


def _has_names(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and all(isinstance(name, str) for name in value)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one or several of {', '.join(_TYPES)}"),
    "enum": (lambda value: isinstance(value, list), "a list of values"),
    "required": (lambda value: _has_names(value, list), "a list of names"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(_TEXTS, (lambda value: isinstance(value, str), "a string")),
    **dict.fromkeys(MAPS, (lambda value: _has_names(value, Mapping), "an object of schemas by name")),
    **dict.fromkeys(LISTS, (lambda value: isinstance(value, list) and bool(value), "a list of schemas, at least one")),
    **dict.fromkeys(_BOUNDS, (_is_number, "a number")),
    # Draft 4 has true and false here.
    **dict.fromkeys(_EXCLUSIVE, (lambda value: _is_number(value) or isinstance(value, bool), "a number")),
    **dict.fromkeys((*_MINIMA, *_MAXIMA), (_is_count, "a whole number, 0 or more")),
}
