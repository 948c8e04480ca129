"""Text and JSON from outside, and Python's own values: read, or refused with one error that names the place."""

import itertools
import json
import random

import pytest

import onward
from onward.errors import RequestError
from onward.testing import ByteTokenizer, tiny_model
from onward.util.text_input import MAX_DEPTH, MAX_DIGITS, TextError, check_value, parse_json, parse_request_json

LM = onward.LanguageModel(tiny_model(seed=7), ByteTokenizer(), prefix_memory=0)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "message", "at"),
    [
        (b"", "Expecting value at line 1, column 1", None),
        ('{"a": 1}'.encode("utf-16"), "it is UTF-16, and must be UTF-8", None),
        ('{"a": 1}'.encode("utf-32"), "it is UTF-32, and must be UTF-8", None),
        (b"\xef\xbb\xbf{\xff}", "byte 4 (0xff) is out of place", None),
        (nested(MAX_DEPTH + 1), "nested too deep", "[0]"),
        (nested(100_000), "nested too deep", None),
        ("9" * (MAX_DIGITS + 1), "more than 4,300 digits", None),
        ('{"a": [{"b c": "\\ud800"}]}', "a lone surrogate (U+D800) at position 0", "a[0]['b c']"),
        ('{"a": {"\\udfff": 1}}', "a has a name that contains a lone surrogate", "a"),
        ('{"a": NaN}', "a is NaN", "a"),
        ('{"a": [1, -1e999]}', "a[1] is -Infinity", "a[1]"),
    ],
)
def test_refused_json(text: str | bytes, message: str, at: str | None) -> None:
    with pytest.raises(TextError) as raised:
        parse_request_json(text)
    assert message in str(raised.value)
    assert raised.value.at == at


def test_accepted_json() -> None:
    assert parse_request_json(b'\xef\xbb\xbf{"a": 1, "a": 2}') == {"a": 2}
    assert parse_request_json("9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    assert parse_request_json('"\\ud83d\\ude00"') == "\U0001f600"
    assert json.dumps(parse_request_json(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    assert parse_json('[Infinity, "\\ud800"]') == [float("inf"), "\ud800"]


def test_a_lone_surrogate_is_found_among_any_escapes() -> None:
    pieces = ["\\ud83d", "\\ude00", "\\\\", "u", "\\uD800", "\\uDFFF", "ud83d", "a", "\\n"]
    random_ = random.Random(1)
    for _ in range(5000):
        text = f'"{"".join(random_.choices(pieces, k=random_.randint(1, 5)))}"'
        is_lone = any(0xD800 <= ord(char) <= 0xDFFF for char in json.loads(text))
        try:
            parse_request_json(text)
            assert not is_lone, text
        except TextError:
            assert is_lone, text


def test_a_value_that_contains_itself_is_nested_too_deep() -> None:
    value: list[object] = []
    value += [value, value]
    with pytest.raises(TextError, match="stop is nested too deep"):
        check_value(value, "stop")


NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "dry_multiplier", "dry_base")
NUMBERS += ("time_limit", "length_penalty", "seed", "xtc_probability", "typical_p", "frequency_penalty")
BAD_OPTIONS = [
    *itertools.product(NUMBERS, [10**400, -(10**400), 10**5000]),
    *itertools.product(["stop", "choice", "bad_words"], ["\ud800", ["a", "b\udfff"]]),
    *itertools.product(["regex", "grammar", "adapter"], ["\ud800"]),
    *(("json_schema", value) for value in ({"const": "\ud800"}, {"\ud800": 1})),
    ("json_schema", {"a": {"b": parse_json(nested(100))}}),
    ("eos", [10**5000]),
    *(((name, 1e300)) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
    ("logit_bias", {1: 1e300}),
    ("logit_bias", {1: 10**400}),
    ("logit_bias", {1: -(10**400)}),
]


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_options_with_invalid_text_or_numbers_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        LM.generate("a", max_new_tokens=1, **{name: value})


def test_prompts() -> None:
    with pytest.raises(RequestError, match="prompt contains a lone surrogate"):
        LM.generate("a\udcff")
    with pytest.raises(RequestError, match="too large to show"):
        LM.generate([10**5000])
