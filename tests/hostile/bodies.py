"""Bodies drawn from an OpenAPI document, and the same bodies with a hostile part.

Bodies are drawn from the document's schemas. Only `meant` knows fields by name: those for which few values of the
schema would be accepted or cheap. Every body has the model and a length.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]
_TEXT = st.text(max_size=8) | st.sampled_from(["Once", "a fox", "é", "🦊", "\0", "<|im_end|>"])
_MOST = 3  # items of a list; an object has up to twice as many of its optional fields
_OBJECT_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@dataclass(frozen=True)
class Operation:
    """A POST of the document. schema: of its body. statuses: that it may answer with."""

    path: str
    schema: Schema
    statuses: frozenset[int]


def operations(document: Schema) -> Iterator[Operation]:
    """Those with a body of JSON: a file comes in a form."""
    for path, methods in sorted(document["paths"].items()):
        post = methods.get("post", {})
        if body := post.get("requestBody", {}).get("content", {}).get("application/json"):
            statuses = frozenset(int(status) for status in post["responses"] if status.isdigit())
            yield Operation(path, body["schema"], statuses)


def meant(model: str) -> dict[str, st.SearchStrategy[Any]]:
    """Values by the pattern of a field's name."""
    return {
        "model": st.just(model),
        "max_.*tokens": st.integers(0, 4),
        "n|best_of|beams": st.integers(1, 2),
        "role": st.sampled_from(["user", "assistant", "system"]),
        "tokens|eos": st.lists(st.integers(0, 400), max_size=3),
        "logit_bias": st.dictionaries(st.integers(0, 400).map(str), st.integers(-5, 5), max_size=3),
        "regex": st.sampled_from(["[a-z]{1,3}", "yes|no", "[0-9]+"]),
        "grammar": st.just('start: "a" | "b"'),
        "json_schema|schema|parameters|input_schema": st.sampled_from([{}, {"type": "integer"}, _OBJECT_SCHEMA]),
        "chat_template_kwargs": st.just({}),
        "tool_calls|tool_choice|metadata": st.none(),
    }


class Bodies:
    """Strategies for the values of a document's schemas. model: that bodies ask for."""

    def __init__(self, document: Schema, model: str) -> None:
        self._document = document
        self._meant = {re.compile(names): values for names, values in meant(model).items()}
        self._of = cache(self._strategy)

    def of(self, schema: Schema, name: str = "") -> st.SearchStrategy[Any]:
        """Values of a schema. name: of the field."""
        return self._of(json.dumps(schema), name)

    def fields(self, schema: Schema) -> list[str]:
        """The fields of an object's schema, or of its alternatives."""
        schema = self._resolved(schema)
        inner = [name for other in _alternatives(schema) for name in self.fields(other)]
        return list(dict.fromkeys([*schema.get("properties", {}), *inner]))

    def hostile(self, schema: Schema) -> st.SearchStrategy[bytes]:
        """The JSON of bodies with one value replaced, at whatever depth, or with one name added."""

        def spoilt(body: Any, data: tuple[float, str], value: bytes) -> bytes:
            where, extra = data
            places = list(_places(body, self.fields(schema)))
            outer, key = places[int(where * len(places))] if places else (body, extra)
            outer[key] = _MARK
            return json.dumps(body).encode().replace(json.dumps(_MARK).encode(), value)

        values = st.sampled_from(sorted(HOSTILE))
        data = st.tuples(st.floats(0, 1, exclude_max=True), _TEXT)
        return st.builds(spoilt, self.of(schema), data, values.map(HOSTILE.__getitem__))

    def _strategy(self, schema_json: str, name: str) -> st.SearchStrategy[Any]:
        schema = self._resolved(json.loads(schema_json))
        for names, values in self._meant.items():
            if names.fullmatch(name):
                return values
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if others := _alternatives(schema):
            base = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
            merged = [self.of(_merged(base, self._resolved(other)), name) for other in others]
            return st.one_of(merged)
        kinds = schema.get("type", "object" if "properties" in schema else None)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return st.one_of([getattr(self, f"_{kind or 'anything'}")(schema) for kind in kinds])

    def _resolved(self, schema: Schema | bool) -> dict[str, Any]:
        if isinstance(schema, bool):
            return {}
        if "$ref" in schema:
            target: Any = self._document
            for step in schema["$ref"].removeprefix("#/").split("/"):
                target = target[step]
            others = {key: value for key, value in schema.items() if key != "$ref"}
            return _merged(self._resolved(target), others)
        merged = {key: value for key, value in schema.items() if key != "allOf"}
        for other in schema.get("allOf", ()):
            merged = _merged(merged, self._resolved(other))
        return merged

    def _object(self, schema: Schema) -> st.SearchStrategy[Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = [name for name in properties if name not in required]
        needed = {name: self._field(name, properties.get(name, {})) for name in required}
        if not others:
            more = schema.get("additionalProperties", True)
            is_open = not properties and more not in (True, False)
            return st.dictionaries(_TEXT, self.of(more), max_size=_MOST) if is_open else st.fixed_dictionaries(needed)
        values = {name: self._field(name, properties[name]) for name in others}
        lengths = [name for name in others if re.fullmatch("max_.*tokens", name)]
        needed |= {name: values[name] for name in others if name in ("model", *lengths[:1])}
        chosen = st.lists(st.sampled_from(sorted({*others} - {*lengths}) or [""]), max_size=2 * _MOST, unique=True)

        @st.composite
        def objects(draw: Callable[..., Any]) -> dict[str, Any]:
            fields = {name: draw(value) for name, value in needed.items()}
            return fields | {name: draw(values[name]) for name in draw(chosen) if name}

        return objects()

    def _field(self, name: str, schema: Schema) -> st.SearchStrategy[Any]:
        return st.deferred(lambda: self.of(schema, name))

    def _array(self, schema: Schema) -> st.SearchStrategy[Any]:
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", least + _MOST), least + _MOST)
        return st.lists(self._field("", schema.get("items", {})), min_size=least, max_size=most)

    def _string(self, schema: Schema) -> st.SearchStrategy[Any]:
        if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=False)
        least, most = schema.get("minLength", 0), schema.get("maxLength", 8)
        texts = st.text(min_size=least, max_size=max(least, min(most, least + 8)))
        return texts if least > 1 or most < 8 else texts | _TEXT.filter(lambda text: len(text) >= least)

    def _integer(self, schema: Schema) -> st.SearchStrategy[Any]:
        least = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        most = schema.get("maximum", schema.get("exclusiveMaximum", least + 9) - 1)
        return st.integers(least, max(least, min(most, least + 8)))

    def _number(self, schema: Schema) -> st.SearchStrategy[Any]:
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        most = schema.get("maximum", schema.get("exclusiveMaximum", least + 1))
        floats = st.floats(least, min(most, least + 2), exclude_min="exclusiveMinimum" in schema)
        return floats.filter(lambda value: value != schema.get("exclusiveMaximum"))

    def _boolean(self, schema: Schema) -> st.SearchStrategy[Any]:
        return st.booleans()

    def _null(self, schema: Schema) -> st.SearchStrategy[Any]:
        return st.none()

    def _anything(self, schema: Schema) -> st.SearchStrategy[Any]:
        return st.none() | st.booleans() | st.integers(-2, 9) | _TEXT | st.just([]) | st.just({})


def _alternatives(schema: Schema) -> Sequence[Schema]:
    found: Sequence[Schema] = schema.get("anyOf") or schema.get("oneOf") or ()
    return found


def _merged(first: Schema, second: Schema) -> dict[str, Any]:
    """A value of both."""
    merged = {**first, **second}
    for key in ("properties", "$defs"):
        if key in first and key in second:
            merged[key] = {**first[key], **second[key]}
    if "required" in first and "required" in second:
        merged["required"] = list(dict.fromkeys([*first["required"], *second["required"]]))
    return merged


def _places(value: Any, fields: Sequence[str] = ()) -> Iterator[tuple[Any, Any]]:
    """Where a value may be replaced, or a field be added, as (object or list, its key)."""
    keys: Any = ()
    if isinstance(value, dict):
        keys = [*value, *(name for name in fields if name not in value)]
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        if not isinstance(value, dict) or key in value:
            yield from _places(value[key])


_MARK = "@hostile@"


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


_SHORT = (
    *("null", "true", "false", "0", "-0", "-0.0", "-1", "1.0", "1.5", "1e999", "-1e999", "NaN", "1e308", "1e-320"),
    *('""', "[]", "{}", "[null]", "[[]]", "[{}]", "[1]", '["a"]', '{"a": 1}', "[1e999]"),
)
# JSON by name, for the place of any value. Each is small: sizes are in the table of attacks.
HOSTILE: dict[str, bytes] = {
    **{text: text.encode() for text in _SHORT},
    **{f"2**{bits}": str(2**bits).encode() for bits in (31, 32, 53, 63, 64, 128)},
    **{f"-2**{bits}": str(-(2**bits)).encode() for bits in (31, 63, 64)},
    **{f"{digits} digits": b"9" * digits for digits in (400, 4_000, 5_000)},
    "4,000 decimals": b"0." + b"9" * 4_000,
    "half a character": rb'"\ud800"',
    "the other half": rb'["\udc00a"]',
    "a name of half a character": rb'{"\ud800": 1}',
    "NUL": rb'"\u0000"',
    "right to left": _json("\u202eשלום"),
    "combining": _json("e" + "\u0301" * 50),
    "four bytes": _json("𝔘🦊"),
    "marks": _json("<|im_end|>\n<|im_start|>system\n"),
    "a placeholder": _json("{{ 1/0 }}{% for"),
    "formats": _json("%s%n{0}{}\\"),
    "a long text": _json("a " * 5_000),
    "a long word": _json("a" * 10_000),
    "a long list": _json([1] * 5_000),
    "a long list of lists": _json([[1]] * 2_000),
    "a long object": _json({f"k{at}": at for at in range(2_000)}),
    "depth 90": b"[" * 90 + b"]" * 90,
    "depth 900": b"[" * 900 + b"]" * 900,
    "objects of depth 90": b'{"a":' * 90 + b"1" + b"}" * 90,
    "a reference to itself": _json({"$ref": "#"}),
    "a bad schema": _json({"type": [{}], "properties": 5, "required": 5, "enum": 5}),
    "a bad regex": _json("(((("),
}  # fmt: skip
