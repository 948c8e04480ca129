"""Numbers in schemas are exact, at any size and in any place."""

import functools
import json
import re
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import onward
from onward.constraints import JsonSchema
from onward.errors import RequestError
from onward.sampling.constraint import admits
from onward.schemas import has_large_numbers, integers_between
from onward.testing import ByteTokenizer, tiny_model

LARGE = 2**53 + 1
# Around every power of two, and so around every width of a machine word.
INTEGERS = st.integers(0, 200).flatmap(lambda power: st.integers(-3, 3).map(lambda more: 2**power + more))
INTEGERS |= st.integers(-(2**200), 2**200) | st.integers(-20, 20)
INTEGERS = st.tuples(INTEGERS, st.sampled_from([1, -1])).map(lambda pair: pair[0] * pair[1])


@functools.cache
def lm() -> onward.LanguageModel:
    return onward.LanguageModel(tiny_model("qwen3", seed=7, vocab_size=270), ByteTokenizer())


def may_be(schema: Any, text: str, *, whitespace: bool = False) -> bool:
    """Whether a text is one that the schema's grammar admits as a whole."""
    constraint = JsonSchema(schema, whitespace=whitespace)(ByteTokenizer(), frozenset({257}))
    for token in text.encode():
        if constraint.is_done or not admits(constraint.mask(), token):
            return False
        constraint.accept(token)
    return constraint.is_done or admits(constraint.mask(), 257)


def refused(schema: Any) -> bool:
    """Whether a schema is refused since no value meets it."""
    try:
        JsonSchema(schema)(ByteTokenizer(), frozenset({257}))
    except RequestError as error:
        if "allows no value" not in str(error) and "Unsatisfiable" not in str(error):
            raise
        return True
    return False


def meets(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@given(st.none() | INTEGERS, st.none() | INTEGERS, st.data())
def test_ranges_of_integers(low: int | None, high: int | None, data: st.DataObject) -> None:
    assume(low is None or high is None or low <= high)
    pattern = re.compile(integers_between(low, high))
    near = [bound + more for bound in (low, high) if bound is not None for more in (-1, 0, 1)]
    for value in (*near, data.draw(INTEGERS)):
        inside = (low is None or value >= low) and (high is None or value <= high)
        assert bool(pattern.fullmatch(str(value))) == inside
    assert not pattern.fullmatch("007")


NUMERIC = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional=dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], INTEGERS),
)
LISTED = st.lists(INTEGERS, min_size=1, max_size=4).map(lambda values: {"enum": values})
LISTED |= INTEGERS.map(lambda value: {"const": value})
# Where a schema may stand, and a value of it there.
PLACES = [
    (lambda schema: schema, lambda value: value),
    (
        lambda schema: {
            "type": "object",
            "properties": {"a": {"type": "string"}, "id": schema},
            "required": ["id"],
            "additionalProperties": False,
        },
        lambda value: {"a": "x", "id": value},
    ),
    (lambda schema: {"type": "object", "properties": {"id": schema}}, lambda value: {"id": value, "more": [1]}),
    (lambda schema: {"type": "object", "additionalProperties": schema}, lambda value: {"any key": value}),
    (lambda schema: {"anyOf": [{"type": "string"}, schema]}, lambda value: value),
    (lambda schema: {"oneOf": [{"type": "null"}, schema]}, lambda value: value),
    (lambda schema: {"allOf": [schema]}, lambda value: value),
    (lambda schema: {"$ref": "#/$defs/id", "$defs": {"id": schema, "no": {"const": LARGE}}}, lambda value: value),
    (lambda schema: {"type": "array", "items": schema, "minItems": 1, "maxItems": 3}, lambda value: [value, value]),
    (lambda schema: {"type": "array", "prefixItems": [{"type": "null"}, schema]}, lambda value: [None, value, "x"]),
    (
        lambda schema: {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"id": schema, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                    "required": ["id", "next"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        },
        lambda value: {"id": value, "next": {"id": value, "next": None}},
    ),
]


@settings(max_examples=60)
@given(NUMERIC | LISTED, st.sampled_from(PLACES), st.data())
def test_a_value_is_admitted_iff_it_meets_the_schema(
    inner: dict[str, Any], place: tuple[Any, Any], data: st.DataObject
) -> None:
    schema, at = place[0](inner), place[1]
    numbers = [number for value in inner.values() for number in (value if isinstance(value, list) else [value])]
    near = {number + more for number in numbers if isinstance(number, int) for more in (-1, 0, 1)}
    if refused(schema):
        assert not any(meets(inner, value) for value in near)
        return
    for value in (*near, data.draw(INTEGERS)):
        text = json.dumps(at(value), separators=(",", ":"))
        assert may_be(schema, text) == meets(schema, at(value)), text
        assert may_be(schema, json.dumps(at(value)), whitespace=True) == meets(schema, at(value))


@settings(max_examples=25)
@given(NUMERIC | LISTED, st.sampled_from(PLACES), st.integers(0, 3))
def test_generated_values_meet_the_schema(inner: dict[str, Any], place: tuple[Any, Any], seed: int) -> None:
    schema = place[0](inner)
    assume(not refused(schema))
    made = lm().generate("x", json_schema=schema, temperature=1.0, seed=seed, max_new_tokens=80)
    if made.finish_reason == "stop":
        assert meets(schema, made.parsed), made.text


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": 1e300}, ["1e+300"], ["1e299", str(int(1e300)), str(10**300)]),
        ({"type": "integer", "minimum": 1e300}, [str(int(1e300))], [str(int(1e300) - 1), "1"]),
        ({"type": "number", "minimum": 0.5, "maximum": LARGE}, ["0.5", "1.25", str(LARGE)], ["0.4", str(LARGE + 1)]),
        ({"const": 0.1}, ["0.1"], ["0.10000000000000001", "0.2"]),
        ({"const": 1.0}, ["1"], ["2"]),
        ({"const": {"a": [LARGE, -0.0, {}]}}, [f'{{"a":[{LARGE},-0.0,{{}}]}}'], [f'{{"a":[{LARGE - 1},-0.0,{{}}]}}']),
        ({"minimum": LARGE}, [str(LARGE), '"x"', "null", "[1]", '{"a":1}'], [str(LARGE - 1), "0"]),
        ({"type": ["integer", "null"], "enum": [1, LARGE, 2.5, None]}, ["1", str(LARGE), "null"], ["2.5"]),
        ({"anyOf": [{"minimum": LARGE}, {"maximum": -LARGE}], "type": "integer"}, [str(-LARGE), str(LARGE)], ["0"]),
        ({"allOf": [{"type": "integer", "minimum": LARGE}, {"maximum": LARGE + 1}]}, [str(LARGE)], [str(LARGE - 1)]),
        ({"oneOf": [{"const": LARGE}, {"const": LARGE + 2}]}, [str(LARGE), str(LARGE + 2)], [str(LARGE + 1)]),
        ({"type": "integer", "exclusiveMinimum": True, "minimum": LARGE}, [str(LARGE + 1)], [str(LARGE)]),
        ({"type": "integer", "multipleOf": LARGE, "minimum": 0, "maximum": 2**60}, ["0", str(3 * LARGE)], ["1"]),
        ({"type": "integer", "multipleOf": 0.5, "minimum": LARGE}, [str(LARGE)], ["0"]),
        ({"type": "string", "minLength": 2.0, "maxLength": 2**64}, ['"ab"'], ['"a"']),
        ({"type": "array", "maxItems": 10**400}, ["[]", "[1]"], ["{}"]),
        ({"type": "integer", "default": 2**70, "examples": [10**300]}, ["5"], ['"x"']),
        ({"type": "object", "properties": {'a "b" / é\x7f': {"const": LARGE}}}, ["{}"], ['{"a \\"b\\" / é\x7f":5}']),
    ],
    ids=lambda value: str(value)[:60],
)
def test_all_kinds_of_numbers(schema: Any, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not may_be(schema, text)] == []
    assert [text for text in wrong if may_be(schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"type": "integer", "multipleOf": LARGE}, "has multipleOf together with integers beyond 2"),
        ({"type": "integer", "minimum": 10**400}, "has a number of more than 320 digits"),
        ({"type": "array", "minItems": 2**63}, "json_schema.minItems is 9223372036854775808, which no text reaches"),
        ({"type": "object", "patternProperties": {"a": {"const": LARGE}}}, "patternProperties cannot be combined"),
        ({"oneOf": [{"minimum": LARGE}, {"maximum": LARGE}]}, "oneOf, unless its cases have different types"),
        ({"type": "integer", "minimum": LARGE, "maximum": 5}, "allows no value"),
        ({"type": "number", "maximum": float("inf")}, "json_schema.maximum must be a number; got inf"),
        ({"default": float("nan")}, "json_schema is not JSON"),
        ({"x-unknown": 10**400}, "json_schema cannot be read: number out of range"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_inexact_schemas_are_refused_before_any_work(schema: Any, error: str) -> None:
    with pytest.raises(RequestError, match=re.escape(error)):
        lm().generate("x", json_schema=schema)


def test_schemas_without_large_numbers_are_unchanged() -> None:
    schema = {"type": "integer", "minimum": -(2**53), "maximum": 2**53}
    assert not has_large_numbers(schema)
    assert json.loads(JsonSchema(schema).source())["grammars"][0]["json_schema"].items() >= schema.items()
    unused = {"type": "null", "$defs": {"id": {"const": LARGE}}}
    assert not has_large_numbers(unused)


@given(
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e25, max_value=1e25),
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    st.sampled_from([0, 1, 10]),
)
@example(-95785602144300.12, "exclusiveMinimum", 0)
@example(-0.24782300582296482, "exclusiveMaximum", 0)
@example(5.005392622513e-13, "exclusiveMinimum", 0)
@example(9.773187837962227e16, "exclusiveMaximum", 0)
def test_no_decimal_beyond_a_bound_is_admitted(bound: float, keyword: str, steps: int) -> None:
    """As decimals, digit by digit: a float's neighbours may round to the float itself."""
    assume(abs(bound) > 1e-30 or bound == 0)
    number = Decimal(repr(bound))
    unit = Decimal(1).scaleb(int(number.as_tuple().exponent)) / 10
    outside = number + steps * unit * (-1 if "inimum" in keyword else 1)
    if steps or "exclusive" in keyword:
        text = format(outside, "f")
        text = text.rstrip("0").rstrip(".") if "." in text else text
        assert not may_be({"type": "number", keyword: bound}, text)


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("least", [0, 1])
def test_short_lists_of_large_numbers(least: int, most: int) -> None:
    schema = {"type": "array", "items": {"const": LARGE}, "minItems": least, "maxItems": most}
    for count in range(4):
        text = json.dumps([LARGE] * count, separators=(",", ":"))
        if least > most:
            assert refused(schema)
        else:
            assert may_be(schema, text) == (least <= count <= most)


def test_examples_may_be_any_number() -> None:
    schema = {"type": "boolean", "default": 10**400, "examples": [{"maximum": 10**400}], "example": 1e308}
    assert may_be(schema, "true")
    named = {"type": "object", "properties": {"default": {"const": 1}}, "required": ["default"]}
    assert not may_be(named, "{}")


def test_large_floats_are_written_portably() -> None:
    """The double nearest to 1e23 is not 10^23, so neither integer is equal in all readers."""
    assert may_be({"const": 1e23}, "1e+23")
    assert not may_be({"const": 1e23}, str(int(1e23)))
    assert not may_be({"const": 1e23}, str(10**23))
    assert may_be({"const": 1e20}, str(10**20))
