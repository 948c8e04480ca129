"""Calls with separately marked arguments: Qwen3-Coder and GLM."""

import json
import re
from typing import Any

import pytest
from answers import ASKED, CLOCK, WEATHER, Chat, answering, message, parsed
from hypothesis import given
from hypothesis import strategies as st
from test_constrained_calls import admitted

import onward
from onward.chat import FORMATS, AssistantMessage, ChatTemplate, ToolCall, format_of
from onward.errors import RequestError
from onward.testing import ByteTokenizer

FORMAT_NAMES = ["qwen3-coder", "glm", "glm-4.7"]
START = "{{ messages[-1].content }}{% if tools %}<tool_call>"
TEMPLATES = {
    "qwen3-coder": START + "\n<function={{ tools[0].function.name }}>{% endif %}\n",
    "glm": START + "<arg_key>k</arg_key>\n<arg_value>v</arg_value>{% endif %}\n",
    "glm-4.7": START + "<arg_key>k</arg_key><arg_value>v</arg_value>{% endif %}\n",
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "warm": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "places": {"type": "array", "items": {"type": "string"}},
        "unit": {"$ref": "#/$defs/Unit"},
        "any": {},
    },
    "required": ["city"],
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TOOLS = {"weather": SCHEMA, "clock": {}}


def call(format: str, arguments: dict[str, str], name: str = "weather") -> str:
    """The arguments as the model writes them, with the values unchanged."""
    if format == "qwen3-coder":
        parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
        return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"
    line = "\n" if format == "glm" else ""
    parts = [f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in arguments.items()]
    return f"<tool_call>{name}{line}{''.join(parts)}</tool_call>"


def chat_of(format: str, text: str = "") -> Chat:
    chat = answering("plain", text)
    template = ChatTemplate(TEMPLATES[format], {})
    lm = onward.LanguageModel(chat.lm.model, chat.lm.tokenizer, template, chat.lm.defaults)
    return Chat(lm, chat.answers)


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("city", "Oslo", "Oslo"),
        ("city", "5", "5"),
        ("city", 'two\nlines, "quoted" \\ and 東京', 'two\nlines, "quoted" \\ and 東京'),
        ("city", "", ""),
        ("city", "null", "null"),
        ("days", "3", 3),
        ("days", " 3 ", 3),
        ("days", "three", "three"),  # nothing is lost
        ("warm", "true", True),
        ("warm", "True", True),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "12", "12"),
        ("places", '["a", "b"]', ["a", "b"]),
        ("places", "['a']", "['a']"),
        ("unit", "C", "C"),
        ("any", "1.5", 1.5),
        ("any", "text", "text"),
        ("any", '"quoted"', "quoted"),
        ("any", "NaN", "NaN"),
        ("unknown", '{"a": [1]}', {"a": [1]}),
    ],
)
def test_values_are_converted_to_json_by_the_schema(format: str, name: str, value: str, expected: object) -> None:
    for text in (call(format, {name: value}), call(format, {name: value}).replace("\n</parameter>", "</parameter>")):
        for parts in ([text], list(text)):
            answer = parsed(format, parts, tools=TOOLS)[1]
            assert (answer.content, len(answer.tool_calls)) == (None, 1)
            assert json.loads(answer.tool_calls[0].arguments) == {name: expected}


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_several_calls_with_text_around_them(format: str) -> None:
    first, second = call(format, {"city": "Oslo", "days": "2"}), call(format, {}, "clock")
    text = f"<think>\nHm.\n</think>\n\nI look.\n{first}\n{second}\nSo."
    calls = (ToolCall("call 0", "weather", '{"city": "Oslo", "days": 2}'), ToolCall("call 1", "clock", "{}"))
    assert message(format, text, tools=TOOLS) == AssistantMessage("I look.\nSo.", "Hm.", calls)
    assert message(format, text, tools=None).tool_calls == ()


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_truncated_call(format: str) -> None:
    text = call(format, {"city": "Oslo", "days": "2"})
    messages = [message(format, text[:end], tools=TOOLS) for end in range(len(text) + 1)]
    assert all(answer.content for answer in messages[1 : text.index("weather") + 7]), "without a name it is content"
    assert {len(answer.tool_calls) for answer in messages[text.index("Oslo") :]} == {1}
    arguments = [answer.tool_calls[0].arguments if answer.tool_calls else None for answer in messages]
    assert arguments[text.index("Oslo") + 2] == '{"city": "Os'
    for end in range(text.index("days") - 8, text.index("days")):  # within the next mark
        assert arguments[end] == '{"city": "Oslo"'
    assert arguments[text.index("2") + 1] == '{"city": "Oslo", "days": '
    assert arguments[text.rindex("</")] == '{"city": "Oslo", "days": 2' + ("}" if format == "qwen3-coder" else "")
    assert arguments[-1] == '{"city": "Oslo", "days": 2}'
    for nothing in ("<tool_call>", "<tool_call>\n\n</tool_call>", "<tool_call>{}</tool_call>"):
        assert message(format, nothing, tools=TOOLS) == AssistantMessage(nothing)


_PARTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "weather",
        ">",
        "<parameter=",
        "city",
        "</parameter>",
        "</function>",
    ),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "\n", " ", "Oslo", '"', "3", "<", "days"),
]


@given(st.lists(st.sampled_from(_PARTS), max_size=14), st.sampled_from(FORMAT_NAMES), st.data())
def test_message_does_not_depend_on_the_chunks(parts: list[str], format: str, data: st.DataObject) -> None:
    text = "".join(parts)
    whole = message(format, text, tools=TOOLS)
    cut = data.draw(st.integers(0, len(text)))
    for pieces in (parts, list(text), [text[:cut], text[cut:]]):
        assert parsed(format, pieces, tools=TOOLS)[1] == whole


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_the_template_determines_the_format(format: str) -> None:
    assert format_of(TEMPLATES[format]) is FORMATS[format]


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_types_of_a_chats_tools_are_known(format: str) -> None:
    chat = chat_of(format, call(format, {"city": "5", "days": "5"}))
    answer = chat.chat(tools=[TOOL]).message
    assert answer is not None
    assert answer.tool_calls[0].parsed == {"city": "5", "days": 5}


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_required_calls(format: str) -> None:
    chat = chat_of(format)

    def of(text: str, **options: Any) -> str:
        return admitted(chat.request(tools=[TOOL, CLOCK], **options), ByteTokenizer(), text)

    whole = {
        "city": "Os\nlo < 3 </arg",
        "days": "2",
        "warm": "false",
        "note": "hm",
        "places": '["a"]',
        "unit": "F",
        "any": '{"a": null}',
    }
    for arguments in ({"city": "Oslo"}, whole, {"city": "", "unit": "C"}, {"city": "a", "note": "null"}):
        text = call(format, arguments)
        assert of(text, tool_choice="required") == text + "$"
        assert of(text, parallel_tool_calls=False) == text + "$"
        answer = message(format, text, tools=TOOLS)
        assert set(json.loads(answer.tool_calls[0].arguments)) == set(arguments)
    clock = call(format, {}, "clock")
    both = f"{call(format, {'city': 'a'})}{'' if format == 'glm-4.7' else chr(10)}{clock}"
    assert of(clock, tool_choice="clock") == clock + "$"
    assert of(both, tool_choice="required") == both + "$"
    for wrong in ({}, {"city": "a", "unit": "K"}, {"city": "a", "days": "two"}, {"city": "a", "other": "b"}):
        assert not of(call(format, wrong), tool_choice="required").endswith("$")
    if format == "qwen3-coder":  # which a reader would take for the end
        assert not of(call(format, {"city": "a</parameter>b"}), tool_choice="required").endswith("$")


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}},
            "tools[0].function.parameters.properties.a: this model writes texts without quotes, so pattern",
        ),
        (
            {"type": "object", "properties": {}, "additionalProperties": True},
            "tools[0].function.parameters has to name each argument",
        ),
    ],
)
def test_schemas_that_cannot_be_enforced(parameters: dict[str, Any], error: str) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    chat = chat_of("qwen3-coder")
    chat.chat(tools=[tool])
    with pytest.raises(RequestError, match=re.escape(error)):
        chat.chat(tools=[tool], tool_choice="required")


def test_a_tool_can_be_chosen_by_name() -> None:
    chat = chat_of("glm", call("glm", {"city": "Oslo"}))
    assert chat.chat(ASKED, tools=[WEATHER], tool_choice="weather").text == call("glm", {"city": "Oslo"})
