"""Every complete text is valid JSON of its schema, according to jsonschema.

ONWARD_SCHEMAS=5000 sets the number of random schemas.
"""

import functools
import json
import os

import jsonschema
import pytest
from hypothesis import given, settings
from schemas import LISTED, schemas

import onward
from onward.errors import RequestError
from onward.testing import ByteTokenizer, tiny_model

SCHEMAS = int(os.environ.get("ONWARD_SCHEMAS", "0"))
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


@functools.cache
def models():
    random = tiny_model("qwen3", seed=11, vocab_size=262, max_position_embeddings=2048)
    return onward.load("demo"), onward.LanguageModel(random, ByteTokenizer())


def assert_valid(completion, schema):
    """Whether the text has ended; then it must be valid."""
    if completion.finish_reason != "stop":
        assert completion.finish_reason == "length"
        return 0
    value = json.loads(completion.text)
    assert completion.parsed == value or value != value
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)
    return 1


def check(schema, seed, rows=3):
    """How many of the texts ended, of so many: each model's, drafted and not."""
    ended = asked = 0
    for lm in models():
        sampled = {"json_schema": schema, "temperature": 1.0, "max_new_tokens": 300}
        per_prompt = [{"seed": seed + row, "draft": [None, "lookup", "suffix"][row % 3]} for row in range(rows)]
        for completion in lm.generate([[65, 66]] * rows, per_prompt=per_prompt, **sampled):
            ended += assert_valid(completion, schema)
            asked += 1
    return ended, asked


@pytest.mark.parametrize("schema", LISTED, ids=lambda schema: json.dumps(schema)[:60])
@pytest.mark.stride(2)
def test_listed_schemas(schema):
    ended, _ = check(schema, seed=1)
    assert ended > 0


def refused(schema):
    """Why a schema is refused, if it is."""
    try:
        models()[0].request("x", json_schema=schema)
    except RequestError as error:
        return str(error)
    return ""


ENDED = [0, 0]


@settings(max_examples=SCHEMAS or 200)
@given(schemas)
def test_random_schemas(schema):
    if unmet := refused(schema):
        assert "Unsatisfiable schema" in unmet
        return
    ended, asked = check(schema, seed=3, rows=2)
    ENDED[0] += ended
    ENDED[1] += asked


def test_most_random_texts_are_complete():
    """The texts of the previous test."""
    ended, asked = ENDED
    assert ended >= asked / 2
