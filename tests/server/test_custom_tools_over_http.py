"""Custom and allowed tools, and the older functions, through OpenAI's client: whole, streamed and answered."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, deltas
from test_tools_over_http import ASKED, TEMPLATE, TOOL

import onward
from onward.chat import ChatTemplate

PATTERN = '(go|stop) "[a-c\n]{3}"'
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "regex", "definition": PATTERN}}
CUSTOM: dict[str, Any] = {"type": "custom", "custom": {"name": "run", "description": "Runs code.", "format": GRAMMAR}}
FLAT = {"type": "custom", "name": "run", "format": {"type": "grammar", "syntax": "regex", "definition": PATTERN}}
OPTIONS: Any = {"model": "demo", "temperature": 1.0}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    demo = onward.load("demo")
    lm = onward.LanguageModel(demo.model, demo.tokenizer, ChatTemplate(TEMPLATE, {}), demo.defaults)
    with LiveServer({"demo": lm}) as live:
        yield live


def test_a_custom_call_of_a_chat_has_an_input(server: LiveServer) -> None:
    choice: Any = {"type": "custom", "custom": {"name": "run"}}
    options = OPTIONS | {"seed": 5, "tools": [TOOL, CUSTOM], "max_tokens": 300, "tool_choice": choice}
    with server.openai() as client:
        whole = client.chat.completions.create(messages=ASKED, **options)
        (only_choice,) = whole.choices
        assert only_choice.finish_reason == "tool_calls"
        (call,) = only_choice.message.tool_calls or ()
        assert call.type == "custom"
        assert call.custom.name == "run"
        assert re.fullmatch(PATTERN, call.custom.input)
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        again = client.chat.completions.create(
            messages=[*ASKED, only_choice.message, result], **(options | {"tool_choice": "none", "max_tokens": 4})
        )
        assert again.choices[0].message.tool_calls is None
    parts = [delta for part in deltas(server.stream(CHAT, {**options, "messages": ASKED}).chunks)
             for delta in part["delta"].get("tool_calls", ())]  # fmt: skip
    assert parts[0] == {"index": 0, "id": call.id, "type": "custom", "custom": {"name": "run", "input": ""}}
    assert all(set(part) == {"index", "custom"} for part in parts[1:])
    assert "".join(part["custom"]["input"] for part in parts) == call.custom.input


def test_a_custom_call_of_a_response_is_an_item_with_its_own_events(server: LiveServer) -> None:
    options = OPTIONS | {"input": "Does it rain?", "tools": [FLAT], "max_output_tokens": 300}
    options |= {"tool_choice": {"type": "custom", "name": "run"}, "extra_body": {"seed": 5}}
    with server.openai() as client:
        response = client.responses.create(**options)
        (call,) = response.output
        assert call.type == "custom_tool_call"
        assert re.fullmatch(PATTERN, call.input)
        events = list(client.responses.create(stream=True, **options))
        parts = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
        assert "".join(parts) == done.input == call.input
        (again,) = events[-1].response.output
        assert (again.type, again.input, again.call_id) == (call.type, call.input, call.call_id)
        back: Any = [{"role": "user", "content": "Does it rain?"}, call.model_dump(exclude_none=True)]
        back.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": "dry"})
        again = client.responses.create(**(options | {"input": back, "tool_choice": "none", "max_output_tokens": 4}))
        assert [item.type for item in again.output] == ["message"]
        lm = server.engines["demo"].lm
        called = {"type": "custom", "id": call.call_id, "custom": {"name": "run", "input": call.input}}
        message = {"role": "assistant", "content": None, "tool_calls": [called]}
        result = {"role": "tool", "tool_call_id": call.call_id, "content": "dry"}
        messages = [{"role": "user", "content": "Does it rain?"}, message, result]
        assert again.usage is not None
        assert again.usage.input_tokens == len(lm.chat_prompt(messages))


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(server: LiveServer, mode: str) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "clock"}}]
    named = {"type": "function", "function": {"name": "clock"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    body = OPTIONS | {"messages": ASKED, "tools": tools, "max_tokens": 300, "seed": 2, "tool_choice": choice}
    body |= {"parallel_tool_calls": False, "max_tokens": 40 if mode == "auto" else 300}
    message = server.post(CHAT, body).json()["choices"][0]["message"]
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    assert names == (["clock"] if mode == "required" else [])
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "clock"}]}
    body = {**body, "input": ASKED, "tools": flat, "tool_choice": choice, "max_output_tokens": body["max_tokens"]}
    for name in ("messages", "max_tokens"):
        del body[name]
    output = server.post(RESPONSES, body).json()["output"]
    assert [item["name"] for item in output if item["type"] == "function_call"] == names


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"tools": [{"type": "custom", "custom": {}}]}, "tools", "tools[0].custom.name must be 1 to 64 letters"),
    (CHAT, {"tools": [{"type": "web"}]}, "tools", "tools[0]"),
    (RESPONSES, {"tools": [{"type": "file_search"}]}, "tools[0]", "must be a function or a custom tool"),
    (RESPONSES, {"tools": [{"type": "custom"}]}, "tools", "tools[0].name must be 1 to 64 letters"),
    (RESPONSES, {"tools": [FLAT | {"format": {"type": "grammar", "syntax": "x", "definition": "a"}}]}, "tools",
     "tools[0].format.syntax must be 'lark' or 'regex'; got 'x'"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must have allowed_tools"),
    (RESPONSES, {"input": [{"type": "custom_tool_call", "call_id": "c"}]}, "input[0]", "a call_id, a name and input"),
    (RESPONSES, {"input": [{"type": "custom_tool_call_output"}]}, "input[0]", "must have a call_id"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "id": "c"}]}]}, "messages",
     "messages[0].tool_calls[0].custom must be"),
    (CHAT, {"functions": 5}, "functions", "must be a list of functions; got 5"),
    (CHAT, {"functions": [5]}, "functions", "functions[0] must be an object with a name; got 5"),
    (CHAT, {"functions": [{"name": "a b"}]}, "functions", "functions[0].name must be 1 to 64 letters"),
    (CHAT, {"functions": [{"name": "f"}], "tools": [TOOL]}, "functions", "and tools exclude each other"),
    (CHAT, {"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", "names 'g', but the tools"),
    (CHAT, {"functions": [{"name": "f"}], "function_call": {}}, "function_call", "must be 'auto', 'none' or"),
    (CHAT, {"function_call": {"name": "f"}}, "function_call", "requires functions"),
    (CHAT, {"functions": [{"name": "f"}], "tool_choice": "auto"}, "functions", "and tool_choice exclude each other"),
    (CHAT, {"messages": [*ASKED, {"role": "assistant", "function_call": 5}]}, "messages",
     "messages[1].function_call must be {'name': …, 'arguments': …}; got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "message"), BAD)
def test_invalid_custom_tools_are_refused(
    server: LiveServer, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = server.post(path, ({"messages": ASKED} if path == CHAT else {"input": "Hi"}) | fields)
    error = json.loads(answer.text)["error"]
    assert (answer.status_code, error["param"], message in error["message"]) == (400, param, True), error


def test_legacy_functions_are_tools(server: LiveServer) -> None:
    function = {**TOOL["function"]}
    body = OPTIONS | {"messages": ASKED, "functions": [function], "max_tokens": 300, "seed": 5}
    asked = body | {"function_call": {"name": "weather"}}
    with server.openai() as client:
        whole = client.chat.completions.create(**asked)
        (only_choice,) = whole.choices
        assert only_choice.finish_reason == "function_call"
        assert only_choice.message.tool_calls is None
        assert only_choice.message.function_call is not None
        assert only_choice.message.function_call.name == "weather"
        chunks = list(client.chat.completions.create(**asked, stream=True))
    parts = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
    assert [part.name for part in parts if part.name] == ["weather"]
    assert "".join(part.arguments or "" for part in parts) == only_choice.message.function_call.arguments
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "function_call"
    tools = OPTIONS | {"messages": ASKED, "tools": [TOOL], "max_tokens": 300, "seed": 5, "tool_choice": "weather"}
    expected = server.post(CHAT, tools).json()
    (call,) = expected["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["arguments"], expected["usage"]) == (
        only_choice.message.function_call.arguments,
        server.post(CHAT, asked).json()["usage"],
    )
    call = {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}
    past = [*ASKED, {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "weather", "content": "rain"}]  # fmt: skip
    answered = server.post(CHAT, body | {"messages": past, "function_call": "none", "max_tokens": 4})
    calls = [{"id": "c", "type": "function", "function": call}]
    now = [*ASKED, {"role": "assistant", "content": None, "tool_calls": calls},
           {"role": "tool", "tool_call_id": "c", "content": "rain"}]  # fmt: skip
    same = OPTIONS | {"messages": now, "tools": [TOOL], "tool_choice": "none", "max_tokens": 4, "seed": 5}
    assert answered.json()["choices"] == server.post(CHAT, same).json()["choices"]
    assert answered.json()["usage"]["prompt_tokens"] == server.post(CHAT, same).json()["usage"]["prompt_tokens"]
