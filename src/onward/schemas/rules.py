"""Grammars of JSON in Lark's syntax for schemas with numbers of any size.

llguidance compiles schemas itself, but stores their numbers as doubles. So of a schema with numbers beyond 2^53 the
parts that lead to such a number become rules here, and everything else stays `%json`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn

from onward.errors import OptionError, RequestError
from onward.schemas.numbers import (
    BOUNDS,
    LARGEST_EXACT,
    LARGEST_FACTOR,
    NUMERIC,
    Document,
    Range,
    has_large_value,
    integer_pattern,
    is_large,
    is_large_itself,
)
from onward.schemas.references import are_disjoint, children, json_equal, kind_of, listed_values, resolve

_ALL_KINDS = ("null", "boolean", "string", "array", "object", "number")
_OBJECT = frozenset({"properties", "required", "additionalProperties"})
_ARRAY = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_TEXT = frozenset({"minLength", "maxLength", "pattern", "format"})
_IN_PLACE = frozenset({"$ref", "allOf", "anyOf", "const", "enum", "oneOf"})
_KNOWN = NUMERIC | _OBJECT | _ARRAY | _TEXT | _IN_PLACE | {"type"}
# Keywords that restrict values, and that have no rules here.
_UNSUPPORTED = frozenset(
    {
        *("additionalItems", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"),
        *("maxContains", "maxProperties", "minContains", "minProperties", "not", "patternProperties", "propertyNames"),
        *("then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicRef", "$recursiveRef"),
    }
)
_STRING = r'"([^"\\\x00-\x1F]|\\["\\\/bfnrt])*"'


class Spacing(NamedTuple):
    """The whitespace and separators of JSON. guidance: for llguidance. item, key: symbols of separators. inside: symbol
    of the whitespace after an opening bracket and before a closing one; empty for none."""

    guidance: Mapping[str, Any]
    item: str
    key: str
    inside: str = ""

    @classmethod
    def free(cls, characters: str, most: int) -> "Spacing":
        """Up to `most` of the characters between two tokens. characters: a class in a regular expression."""
        some = f"{characters}{{0,{most}}}"
        guidance = {"whitespace_pattern": f"{characters}{{1,{most}}}"}
        return cls(guidance, f"/{some},{some}/", f"/{some}:{some}/", f"/{characters}{{1,{most}}}/?")


# The spacing of json.dumps and of templates' tojson, as in training data.
SPACED = Spacing({"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}, '", "', '": "')


def json_rules(name: str, schema: Any, spacing: Spacing, at: str, *, is_expanded: bool = False) -> list[str]:
    """The rules of JSON that matches a schema; the first is called `name`, and the others begin with it.

    schema: checked by `check_schema`. at: its place, for errors. is_expanded: an object and the consts in it get rules
    here even without large numbers.

    Raises:
        RequestError: an integer beyond 2^53 next to an unsupported keyword, or no value matches the schema.
    """
    if schema is False:
        raise OptionError(at, "allows no value")
    document = Document(schema)
    if is_expanded:
        for one in (schema, *schema["properties"].values()):
            if one is schema or "const" in one:
                document.add_large(one)
    if not document.has_large(schema):
        return [f"{name}: {_fragment(schema, spacing)}"]
    rules = _Rules(name, document, spacing)
    if rules.symbol(schema, at) is None:
        raise OptionError(at, "allows no value")
    return [f"{symbol}: {right}" for symbol, right in rules.rules.items()]


def has_large_numbers(schema: Any) -> bool:
    """Whether llguidance would round a number of a schema."""
    return Document(schema).has_large(schema)


def _fragment(schema: Any, spacing: Spacing, definitions: Mapping[str, Any] = {}) -> str:
    plain = schema if isinstance(schema, Mapping) else {}
    return f"%json {json.dumps({**plain, **definitions, 'x-guidance': spacing.guidance})}"


class _Rules:
    """Creates the rules of a document's subschemas, each once."""

    def __init__(self, name: str, document: Document, spacing: Spacing) -> None:
        self._name, self._document, self._spacing = name, document, spacing
        self._symbols: dict[int, str | None] = {}
        self._alive: list[Any] = []  # derived schemas, so that their ids aren't reused
        self.rules: dict[str, str] = {}
        self._names = 0

    def symbol(self, schema: Any, at: str) -> str | None:
        """The name of the rule of a schema; None if no value matches it."""
        if schema is False:
            return None
        if id(schema) not in self._symbols or not isinstance(schema, Mapping):
            name = self._new_name()
            self._symbols[id(schema)] = name
            self._alive.append(schema)
            if self._document.has_large(schema):
                cases = [case for case in self._cases(schema, at) if case is not None]
                self.rules[name] = " | ".join(cases)
                if not cases:
                    del self.rules[name]
                    self._symbols[id(schema)] = None
            else:
                self.rules[name] = _fragment(schema, self._spacing, self._document.definitions(schema))
        return self._symbols[id(schema)]

    def _new_name(self) -> str:
        name = f"{self._name}_{self._names}" if self._names else self._name
        self._names += 1
        self.rules[name] = ""  # reserves the order
        return name

    def _derived(self, schema: Mapping[str, Any], at: str, *, large: bool) -> str | None:
        """The rule of a schema that was derived from one of the document's."""
        self._alive.append(schema)
        if large:
            self._document.add_large(schema)
        return self.symbol(schema, at)

    def _cases(self, schema: Mapping[str, Any], at: str) -> Iterator[str | None]:
        """The alternatives of a schema's rule."""
        if unknown := sorted(_UNSUPPORTED & set(schema)):
            _refuse(at, unknown[0])
        schema = {key: value for key, value in schema.items() if key in _KNOWN}
        in_place = [key for key in schema if key in _IN_PLACE]
        if not in_place:
            yield from self._typed(schema, at)
        elif (values := listed_values(schema)) is not None:
            yield from self._values(schema, values, at)
        elif len(in_place) > 1:
            _refuse(at, " and ".join(in_place))
        elif in_place == ["$ref"]:
            if len(schema) > 1:
                _refuse(at, "$ref combined with other keywords")
            yield self.symbol(resolve(schema["$ref"], self._document.root), at)
        elif in_place == ["allOf"]:
            yield self._intersection(schema, at)
        else:
            yield from self._union(schema, in_place[0], at)

    def _typed(self, schema: Mapping[str, Any], at: str) -> Iterator[str | None]:
        """The cases of a schema without unions, values and references, by type."""
        kinds = schema.get("type", list(_ALL_KINDS))
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        large = {"number": is_large_itself(schema)}
        for kind, keywords in (("object", _OBJECT), ("array", _ARRAY)):
            large[kind] = any(self._document.has_large(each) for key, _, each in children(schema) if key in keywords)
        plain = [kind for kind in kinds if not large.get("number" if kind == "integer" else kind)]
        if plain:
            dropped = {"number": NUMERIC, "object": _OBJECT, "array": _ARRAY}
            rest = {key: v for key, v in schema.items() if not any(large[k] and key in dropped[k] for k in large)}
            yield self._derived(rest | {"type": plain}, at, large=False)
        if large["number"] and "number" in kinds:
            yield from self._numbers(schema, at)
        elif large["number"] and "integer" in kinds:
            yield integer_pattern(*Range.of(schema).integers(), Range.of(schema).factor, at)
        if large["object"] and "object" in kinds:
            yield self._object(schema, at)
        if large["array"] and "array" in kinds:
            yield self._array(schema, at)

    def _numbers(self, schema: Mapping[str, Any], at: str) -> Iterator[str | None]:
        """All numbers up to 2^53, which are exact in llguidance; beyond it the integers, as doubles have no others."""
        allowed = Range.of(schema)
        low, high = allowed.integers()
        if allowed.factor is None or allowed.factor.numerator <= LARGEST_FACTOR:
            bounds = {key: schema[key] for key in NUMERIC if key in schema and not is_large(schema[key])}
            for keyword, end in (("minimum", -LARGEST_EXACT), ("maximum", LARGEST_EXACT)):
                if not {keyword, f"exclusive{keyword.capitalize()}"} & set(bounds):
                    bounds[keyword] = end
            if (low is None or low <= LARGEST_EXACT) and (high is None or high >= -LARGEST_EXACT):
                yield self._derived({"type": "number", **bounds}, at, large=False)
        if high is None or high > LARGEST_EXACT:
            least = LARGEST_EXACT + 1 if low is None else max(low, LARGEST_EXACT + 1)
            yield integer_pattern(least, high, allowed.factor, at)
        if low is None or low < -LARGEST_EXACT:
            most = -LARGEST_EXACT - 1 if high is None else min(high, -LARGEST_EXACT - 1)
            yield integer_pattern(low, most, allowed.factor, at)

    def _values(self, schema: Mapping[str, Any], values: Sequence[Any], at: str) -> Iterator[str | None]:
        """The values that a schema lists, if its other keywords allow them."""
        others = set(schema) - {"const", "enum", "type"} - NUMERIC
        if others:
            _refuse(at, f"{min(others)} combined with const or enum")
        if "const" in schema and not any(json_equal(schema["const"], each) for each in schema.get("enum", values)):
            return
        kinds = schema.get("type", [kind_of(value) for value in values])
        kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        allowed = Range.of(schema)
        plain = []
        for value in values:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            kind = "integer" if is_number and value == value // 1 else kind_of(value)
            if not ({kind, "number"} if is_number else {kind}) & kinds or (is_number and not allowed.has(value)):
                continue
            if has_large_value(value):
                yield self._json(value)
            else:
                plain.append(value)
        if plain:
            yield self._derived({"enum": plain}, at, large=False)

    def _json(self, value: Any) -> str:
        if isinstance(value, Mapping):
            parts = [f"{_literal(name)} {self._spacing.key} {self._json(one)}" for name, one in value.items()]
            return self._bracketed("{}", f" {self._spacing.item} ".join(parts), not parts)
        if isinstance(value, list):
            inner = f" {self._spacing.item} ".join(map(self._json, value))
            return self._bracketed("[]", inner, not value)
        if isinstance(value, float) and is_large(value):
            symbols = [_literal(value)]
            if int(value) == int(Decimal(repr(value))):  # otherwise the double differs from the decimal
                symbols.append(json.dumps(str(int(value))))
            return f"({' | '.join(symbols)})"
        return json.dumps(str(value)) if is_large(value) else _literal(value)

    def _intersection(self, schema: Mapping[str, Any], at: str) -> str | None:
        """The intersection of several schemas: a single one, or several with numeric keywords and types only."""
        members = [*schema["allOf"], {key: value for key, value in schema.items() if key != "allOf"}]
        members = [member for member in members if member not in ({}, True)]
        if len(members) == 1:
            return self.symbol(members[0], at)
        merged: dict[str, Any] = {}
        for member in members:
            if not isinstance(member, Mapping) or not set(member) & _KNOWN <= NUMERIC | {"type"}:
                _refuse(at, "allOf")
            merged = _merge(merged, member, at)
        return self._derived(merged, at, large=True)

    def _union(self, schema: Mapping[str, Any], keyword: str, at: str) -> Iterator[str | None]:
        branches = schema[keyword]
        if keyword == "oneOf" and not are_disjoint(branches, self._document.root):
            _refuse(at, "oneOf, unless its cases have different types or values,")
        others = {key: value for key, value in schema.items() if key != keyword}
        for number, branch in enumerate(branches):
            place = f"{at}.{keyword}[{number}]"
            if not others or branch is False:
                yield self.symbol(branch, place)
                continue
            branch = {} if branch is True else branch
            if not set(others) <= NUMERIC | _TEXT | {"type"} or set(branch) & (_IN_PLACE | set(others)):
                _refuse(at, f"{keyword} combined with {min(others)}")
            yield self._derived({**branch, **others}, place, large=True)

    def _object(self, schema: Mapping[str, Any], at: str) -> str | None:
        """Properties in the schema's order, then others."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        more = schema.get("additionalProperties", True)
        parts: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*properties, *required]):
            symbol = self.symbol(properties.get(name, more), f"{at}.properties.{name}")
            if symbol is not None:
                parts.append((f"{_literal(name)} {self._spacing.key} {symbol}", name in required))
            elif name in required:
                return None
        after = alone = ""
        others = self.symbol(more, f"{at}.additionalProperties")
        if others is not None:
            names = dict.fromkeys([*properties, *required])
            used = "|".join(re.escape(json.dumps(name, ensure_ascii=False)).replace("/", r"\/") for name in names)
            name = self._new_name()
            self.rules[name.upper()] = f"/{_STRING}/" + (f" & ~/{used}/" if used else "")
            self.rules[name] = f"{name.upper()} {self._spacing.key} {others}"
            after = f"({self._spacing.item} {name})*"
            alone = f"{name} {after}"
        may_be_empty = not any(is_required for _, is_required in parts)
        return self._sequence("{}", parts, after, alone, may_be_empty)

    def _array(self, schema: Mapping[str, Any], at: str) -> str | None:
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if isinstance(items, list):
            _refuse(at, "items as a list")
        parts: list[tuple[str, bool]] = []
        for number, item in enumerate(first[:most]):
            symbol = self.symbol(item, f"{at}.prefixItems[{number}]")
            if symbol is None:
                most = number
                break
            parts.append((symbol, number < least))
        tail = self.symbol(items, f"{at}.items") if most is None or most > len(parts) else None
        if least > (len(parts) if tail is None else least if most is None else most):
            return None
        after = alone = ""
        if tail:
            low, high = max(0, least - len(parts)), None if most is None else most - len(parts)
            after = "" if high == 0 else f"({self._spacing.item} {tail}){_times(low, high)}"
            if not parts:
                more = _times(max(0, low - 1), None if high is None else high - 1)
                alone = tail if high == 1 else f"{tail} ({self._spacing.item} {tail}){more}"
        return self._sequence("[]", parts, after, alone, not least)

    def _sequence(
        self, brackets: str, parts: Sequence[tuple[str, bool]], after: str, alone: str, may_be_empty: bool
    ) -> str:
        """Parts in brackets, with separators.

        parts: each with whether it is required; in a list a part requires those before it. after: follows the last
        part. alone: replaces the parts if there are none; empty for nothing.
        """
        is_list = brackets == "[]"
        for part, is_required in reversed(parts):
            begin, follow = self._new_name(), self._new_name()
            self.rules[begin] = f"{part} {after}"
            self.rules[follow] = f"{self._spacing.item} {part} {after}"
            if not is_required:
                if not is_list:
                    self.rules[begin] += f" | {alone}" if alone else ""
                    self.rules[follow] += f" | {after}" if after else ""
                follow = follow if after and not is_list else f"{follow}?"
            alone, after = begin, follow
        return self._bracketed(brackets, alone, may_be_empty)

    def _bracketed(self, brackets: str, inner: str, may_be_empty: bool) -> str:
        opening, closing, inside = brackets[0], brackets[1], self._spacing.inside
        cases = [f'"{opening}" {inside} {inner} {inside} "{closing}"'] if inner else []
        cases += [f'"{opening}" {inside} "{closing}"'] if may_be_empty else []
        return f"({' | '.join(cases)})"


def _merge(one: Mapping[str, Any], other: Mapping[str, Any], at: str) -> dict[str, Any]:
    """A schema with the numeric keywords and types of two."""
    merged = {**one}
    for key, value in other.items():
        if key not in merged or merged[key] == value:
            merged[key] = value
        elif key == "type":
            kinds = _kinds(merged[key]) & _kinds(value)
            merged[key] = sorted(kinds - {"integer"} if "number" in kinds else kinds)
        elif key in BOUNDS and not isinstance(value, bool):
            merged[key] = (max if "inimum" in key else min)(merged[key], value)
        elif key in _KNOWN:
            _refuse(at, f"allOf with several {key}")
    return merged


def _kinds(kind: str | list[str]) -> set[str]:
    """A set of types, with "integer" if it has "number"."""
    kinds = {kind} if isinstance(kind, str) else set(kind)
    return kinds | {"integer"} if "number" in kinds else kinds


def _times(low: int, high: int | None) -> str:
    if high is None:
        return "*" if not low else f"{{{low},}}"
    return f"{{{low},{high}}}"


def _literal(value: Any) -> str:
    return lark_string(json.dumps(value, ensure_ascii=False))


def lark_string(text: str) -> str:
    """A text as a string in Lark's syntax, which is JSON's except for a raw delete."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _refuse(at: str, keyword: str) -> NoReturn:
    raise RequestError(
        f"{at}: {keyword} cannot be combined with integers beyond 2^53: leave one of them out, or write the schema "
        "without it",
        at,
    )
