"""Schemas of tools: malformed ones are named before any work, unusual ones work, and large ones are fast."""

import json
import time
from typing import Any

import pytest
from answers import ASKED, Chat, message
from hypothesis import given
from hypothesis import strategies as st
from test_constrained_calls import admitted
from test_schema_with_tools import CALLS, chat_of

from onward.chat import FORMATS
from onward.errors import RequestError
from onward.protocols import BodyError, BodyReader
from onward.schemas import alternatives, kinds_of
from onward.testing import ByteTokenizer


def tool(parameters: Any, name: str = "weather") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def of(x: Any, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": x}, **others}


MALFORMED = [
    (of({"type": [{}]}), ".properties.x.type must be one or several of"),
    (of({"type": 5}), ".properties.x.type"),
    (of({"type": []}), ".properties.x.type"),
    (of({"type": "int"}), ".properties.x.type"),
    (of({"enum": 5}), ".properties.x.enum must be a list of values; got 5"),
    ({"type": "object", "properties": []}, ".properties must be an object of schemas"),
    ({"type": "object", "properties": 5}, ".properties must be"),
    (of({}, required=5), ".required must be a list of names"),
    (of({}, required=[5]), ".required must be"),
    (of(5), ".properties.x must be a JSON Schema: an object, true or false; got 5"),
    (of(None), ".properties.x must be"),
    (of({"type": "array", "items": 5}), ".properties.x.items must be"),
    (of({"prefixItems": {}}), ".properties.x.prefixItems must be a list of schemas"),
    (of({"$ref": "#/$defs/y"}), ".properties.x.$ref refers to '#/$defs/y', and there is nothing there"),
    (of({"$ref": "#/type"}), ".properties.x.$ref refers to '#/type', and there is no schema there"),
    (of({"$ref": 5}), ".properties.x.$ref must be a string"),
    (
        {"type": "object", "properties": {"type": True, "x": {"$ref": "#/properties"}}},
        ".properties.x.$ref.type",
    ),
    (of({"$ref": "#/properties/x"}), ".properties.x refers to itself alone"),
    (of({"$ref": "#/$defs/a"}, **{"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}}), "refers to itself alone"),
    (of({"anyOf": {}}), ".properties.x.anyOf must be a list of schemas, at least one"),
    (of({"anyOf": []}), ".properties.x.anyOf must be"),
    (of({"allOf": [True, 5]}), ".properties.x.allOf[1] must be"),
    (of({}, additionalProperties=5), ".additionalProperties must be"),
    (of({5: 5}), ".properties.x must be an object whose keys are strings"),
    ({"type": "object", "properties": {5: {}}}, ".properties must be an object of schemas by name"),
    (of({"minimum": "5"}), ".properties.x.minimum must be a number"),
    (of({"maximum": float("inf")}), ".properties.x.maximum must be a number"),
    (of({"multipleOf": 0}), ".properties.x.multipleOf must be a number above 0"),
    (of({"minLength": -1}), ".properties.x.minLength must be a whole number, 0 or more"),
    (of({"pattern": 5}), ".properties.x.pattern must be a string"),
    (of({}, **{"$defs": {"a": {"type": 5}}}), ".$defs.a.type must be"),
    (of({"properties": {"properties": {"type": 5}}}), ".properties.x.properties.properties.type must be"),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "error"), MALFORMED, ids=lambda value: str(value)[:50])
def test_a_malformed_schema_is_named_for_every_format(parameters: Any, error: str) -> None:
    for format in CALLS:
        for choice in ("auto", "none", "required"):
            chat = chat_of(format)
            with pytest.raises(RequestError) as refused:
                chat.request(tools=[tool({"type": "object"}, "first"), tool(parameters)], tool_choice=choice)
            assert str(refused.value).startswith("tools[1].function.parameters")
            assert error in str(refused.value)
    reader = BodyReader(chat_of("hermes").lm, "m")
    with pytest.raises(BodyError) as body:
        reader.read("/v1/chat/completions", {"messages": ASKED, "tools": [tool(parameters)]})
    assert (body.value.status, body.value.param) == (400, "tools")
    flat = {"type": "function", "name": "weather", "parameters": parameters}
    with pytest.raises(BodyError) as body:
        reader.read("/v1/responses", {"input": "Hi", "tools": [flat]})
    assert (body.value.status, body.value.param) == (400, "tools")
    assert str(body.value).startswith("tools[0].parameters"), "a tool has no inner object here"


@pytest.mark.parametrize(
    "x",
    [
        True,
        {},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/y"}]},
        {"const": "null"},
        {"enum": ["", "a b", 5, None]},
        {"type": "array"},
        {"title": "type", "examples": [{"type": 5}], "default": {"$ref": 5}},
        {"properties": {"type": {"type": "string"}, "$ref": True}},
    ],
    ids=str,
)
def test_unusual_schemas_work_in_every_format(x: Any) -> None:
    parameters = of(x, **{"$defs": {"y": {"type": "boolean"}}})
    for format in CALLS:
        request = chat_of(format).request(tools=[tool(parameters)], tool_choice="required")
        assert request.options.new_constraint(ByteTokenizer()) is not None


def test_a_false_property_must_be_absent() -> None:
    chat = chat_of("qwen3-coder")
    chat.request(tools=[tool(of(False))], tool_choice="required")
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters\.properties\.x allows no value"):
        chat.request(tools=[tool(of(False, required=["x"]))], tool_choice="required")


@pytest.mark.parametrize("format", ["qwen3-coder", "glm", "hermes"])
def test_references_are_followed_once(format: str) -> None:
    """50 schemas that each refer to all 50: paths through them have no number."""
    each = {f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{to}"} for to in range(50)] + [{"const": at}]} for at in range(50)}
    parameters = of({"$ref": "#/$defs/a0"}, **{"$defs": each})
    began = time.process_time()
    assert len(alternatives(parameters["properties"]["x"], parameters)) == 50
    assert kinds_of(parameters["properties"]["x"], parameters) == {"integer"}
    text = CALLS[format].replace("city", "x").replace('"Oslo"', "7").replace("Oslo", "7")
    chat = chat_of(format, text)
    answer = chat.chat(tools=[tool(parameters)]).message
    assert answer is not None
    assert answer.tool_calls[0].parsed == {"x": 7}
    assert time.process_time() - began < 20, "there are 50^50 paths"


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────

TOOL_NAMES = [
    "GET_ARGUMENTS",
    "ARGUMENTS",
    "NAME",
    "VALUE",
    "MAX_VALUE",
    "arguments_0",
    "call",
    "a.b-c",
    "0",
    "NAME_VALUE",
]
PARAMETERS = [
    "VALUE",
    "MAX_VALUE",
    "NAME",
    "ARGUMENTS",
    "arguments_0",
    "x y",
    'a"b',
    "a\\b",
    "{x}",
    "é",
    "雪",
    "$ref",
    "/",
    "]",
    "a'b",
]


def call_text(format: str, name: str, parameter: str) -> str:
    text = CALLS[format].replace("weather", "\0")
    if "{" in text:
        return text.replace('"city"', json.dumps(parameter, ensure_ascii=False)).replace("\0", name)
    return text.replace("city", parameter).replace("\0", name)


@pytest.mark.parametrize("format", CALLS)
@pytest.mark.stride(2)
def test_a_constrained_call_uses_the_names_of_its_tool(format: str) -> None:
    for name, parameter in zip(TOOL_NAMES * 2, PARAMETERS, strict=False):
        parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
        text = call_text(format, name, parameter)
        chat: Chat = chat_of(format, text)
        for options in ({"tool_choice": "required"}, {"json_schema": {"const": "x"}}, {"parallel_tool_calls": False}):
            request = chat.request(tools=[tool(parameters, name)], **options)
            assert admitted(request, ByteTokenizer(), text) == f"{text}$"
        answer = chat.chat(tools=[tool(parameters, name)], tool_choice="required").message
        assert answer is not None
        assert [(call.name, call.parsed) for call in answer.tool_calls] == [(name, {parameter: "Oslo"})]


@given(st.sampled_from(list(CALLS)), st.text(st.characters(codec="utf-8"), min_size=1, max_size=8))
def test_parameters_make_the_round_trip_or_are_refused(format: str, parameter: str) -> None:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    chat = chat_of(format)
    syntax = FORMATS[format].syntax
    if syntax is not None and syntax.argument is not None and not syntax.argument.names.fullmatch(parameter):
        with pytest.raises(RequestError, match="cannot have an argument of this name"):
            chat.request(tools=[tool(parameters, "weather")], tool_choice="required")
        return
    request = chat.request(tools=[tool(parameters, "weather")], tool_choice="required")
    constraint = request.options.new_constraint(ByteTokenizer())
    assert constraint is not None
    if "{" in CALLS[format]:
        return  # names are in JSON, which llguidance generates
    text = call_text(format, "weather", parameter)
    assert admitted(request, ByteTokenizer(), text) == f"{text}$"
    (call,) = message(format, text, tools={"weather": parameters}).tool_calls
    assert call.parsed == {parameter: "Oslo"}


@pytest.mark.parametrize("format", CALLS)
@pytest.mark.parametrize(
    "x", [{"enum": []}, {"type": "string", "pattern": "("}, {"type": "array", "contains": {}}, {"not": {}}], ids=str
)
def test_an_uncompilable_schema_is_named_with_its_tool(format: str, x: Any) -> None:
    tools = [tool(of({"type": "boolean"}, required=["x"])), tool(of(x, required=["x"]))]
    tools[1]["function"]["name"] = "second"
    chat = chat_of(format)
    with pytest.raises(RequestError, match=r"^tools\[1\]\.function\.parameters"):
        chat.request(tools=tools, tool_choice="required").options.new_constraint(ByteTokenizer())


@pytest.mark.parametrize("format", CALLS)
def test_numeric_keywords_that_restrict_no_text_are_accepted(format: str) -> None:
    x = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2**64, "minItems": 1.0, "default": 10**400}
    request = chat_of(format).request(tools=[tool(of(x, required=["x"]))], tool_choice="required")
    assert request.options.new_constraint(ByteTokenizer()) is not None
