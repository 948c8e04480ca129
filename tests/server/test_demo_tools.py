"""Tools with the shipped demo model: its template shows them, and required calls are valid."""

import json
from typing import Any

import pytest
from live_server import LiveServer

import onward

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Oslo?"}]
RESULT = '{"weather": "rain", "degrees": 4}'


def weather(city: str) -> str:
    """The weather in a city."""
    return RESULT if city else ""


def clock(hour: int) -> str:
    """Set an alarm."""
    return f"set for {hour}"


def described(name: str, parameter: str, kind: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": kind, "maxLength": 12}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.fixture(scope="module")
def demo() -> onward.LanguageModel:
    return onward.load("demo")


def test_the_template_shows_tools_calls_and_results(demo: onward.LanguageModel) -> None:
    assert demo.chat_template is not None
    tools = [described("weather", "city", "string"), described("clock", "hour", "integer")]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "rain"})
    lines = "\n".join(json.dumps(tool["function"]) for tool in tools)
    call_text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    rest = (
        "<|im_start|>user\nWhat is the weather in Oslo?<|im_end|>\n"
        f"<|im_start|>assistant\n{call_text}\n{call_text}<|im_end|>\n"
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n"
    )
    assert demo.chat_template.render(messages, tools=tools) == f"<|im_start|>system\nTools:\n{lines}<|im_end|>\n{rest}"
    system = {"role": "system", "content": "Be brief."}
    begun = f"<|im_start|>system\nBe brief.\n\nTools:\n{lines}<|im_end|>\n"
    assert demo.chat_template.render([system, *messages], tools=tools) == begun + rest
    assert demo.chat_template.render(messages) == rest, "without tools there is no system turn"


@pytest.mark.parametrize("choice", ["required", "clock", {"type": "function", "function": {"name": "weather"}}])
def test_required_calls_are_valid_and_answered(demo: onward.LanguageModel, choice: Any) -> None:
    tools = [described("weather", "city", "string"), described("clock", "hour", "integer")]
    options: dict[str, Any] = {"tools": tools, "parallel_tool_calls": False, "max_new_tokens": 200, "temperature": 0.0}
    answer = demo.chat(ASKED, tool_choice=choice, **options)
    assert answer.message is not None
    (call,) = answer.message.tool_calls
    if choice != "required":
        assert call.name == (choice if choice == "clock" else "weather")
    (value,) = call.parsed.values()
    assert isinstance(value, int if call.name == "clock" else str)
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    last = demo.chat([*ASKED, answer.message, result], tool_choice="none", **{**options, "max_new_tokens": 30})
    assert last.message is not None
    assert not last.message.tool_calls
    assert last.message.content


def test_python_functions_are_tools_and_auto_is_read(demo: onward.LanguageModel) -> None:
    """The model is free not to call; any output is a message."""
    answer = demo.chat(ASKED, tools=[weather, clock], max_new_tokens=40, temperature=0.0)
    assert answer.message is not None
    assert answer.message.content or answer.message.tool_calls


def test_through_openais_client(server: LiveServer, lm: onward.LanguageModel) -> None:
    tools: Any = [described("weather", "city", "string")]
    options: Any = {"model": "demo", "tools": tools, "seed": 3}
    with server.openai() as client:
        asked: Any = {"messages": ASKED, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
        first = client.chat.completions.create(**options, **asked).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.tool_calls
        (call,) = first.message.tool_calls
        assert call.type == "function"
        assert set(json.loads(call.function.arguments)) == {"city"}
        chunks = client.chat.completions.create(**options, **asked, stream=True)
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(part.function.arguments or "" for part in parts if part.function) == call.function.arguments
        messages: Any = [*ASKED, first.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
        last = client.chat.completions.create(**options, messages=messages, tool_choice="none", max_tokens=20)
        assert last.choices[0].message.content
    assert lm.message_format.name == "hermes"
