"""Answers with calls, cut at every position: no part of a mark becomes content or part of an argument."""

import json
from typing import Any

import pytest
from answers import message, parsed

from onward.chat import FORMATS, AssistantMessage, MessageDelta

OBJECT = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: dict[str, Any] = {"weather": OBJECT, "clock": {"type": "object"}}
CITY = "Oslo"
JSON = '{"city": "Oslo", "days": 2}'
# Two calls each, and the text around them.
ANSWERS = {
    "hermes": (
        f'<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    ),
    "qwen3-coder": (
        "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
    ),
    "glm": (
        "<think>Hm.</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>"
    ),
    "glm-4.7": (
        "<think>Hm.</think>I look.<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>clock</tool_call>"
    ),
    "mistral-args": f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]clock[ARGS]{{}}",
    "mistral": (
        f'[THINK]Hm.[/THINK]I look.[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}}}, '
        '{"name": "clock", "arguments": {}}]'
    ),
    "llama3": f'I look.<|python_tag|>{{"name": "weather", "parameters": {JSON}}}',
    "harmony": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>"
    ),
}


def content_of(deltas: list[MessageDelta]) -> str:
    return "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("format", ANSWERS)
def test_marks_after_a_call_are_never_content(format: str) -> None:
    text = ANSWERS[format]
    assert set(FORMATS) - set(ANSWERS) == {"plain"}
    whole = message(format, text, tools=TOOLS)
    assert (whole.content, len(whole.tool_calls)) == ("I look.", 1 if format == "llama3" else 2)
    had_calls = False
    for end in range(len(text) + 1):
        cut = message(format, text[:end], tools=TOOLS)
        deltas, streamed = parsed(format, list(text[:end]), tools=TOOLS)
        assert streamed == cut == AssistantMessage.of(deltas)
        assert content_of(deltas) == (cut.content or "")
        had_calls |= bool(cut.tool_calls)
        assert bool(cut.tool_calls) == had_calls, "a call that has begun stays one"
        if not cut.tool_calls:
            continue
        left = (cut.content or "").removeprefix("I look.")
        if format == "mistral":  # where calls are a list there is no mark before the second
            assert left == "" or '{"name": "clock"'.startswith(left)
        else:
            assert left == ""
        first, *others = cut.tool_calls
        assert JSON.startswith(first.arguments)
        assert [call.arguments for call in others] in ([], [""], ["{"], ["{}"])


@pytest.mark.parametrize("format", ["qwen3-coder", "glm", "glm-4.7"])
def test_arguments_exclude_their_end_mark(format: str) -> None:
    text = ANSWERS[format]
    start = text.index(CITY)
    for end in range(start, text.index("days")):
        (call,) = message(format, text[:end], tools=TOOLS).tool_calls
        value = call.arguments.removeprefix('{"city": "').removesuffix('"')
        assert CITY.startswith(value)
        assert value == CITY or end < start + len(CITY)


def test_text_that_resembles_a_mark_stays() -> None:
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    for after in ("a <", "<b>", "</tool", "a <tool_call> b"):
        assert message("hermes", f"{call}\n{after}.", tools=TOOLS).content == f"{after}."
    (read,) = message("qwen3-coder", ANSWERS["qwen3-coder"].replace("Oslo", "a </par b"), tools=TOOLS).tool_calls[:1]
    assert json.loads(read.arguments) == {"city": "a </par b", "days": 2}
