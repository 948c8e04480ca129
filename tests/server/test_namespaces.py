"""Namespaces of tools in responses: calls have the namespace, and are read back with it."""

import json
from typing import Any

from live_server import LiveServer

PATH = "/v1/responses"
SPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {
            "type": "function",
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {"name": {"enum": ["Ada", "Ben"]}},
                "required": ["name"],
                "additionalProperties": False,
            },
        }
    ],
}
ASKED: dict[str, Any] = {"role": "user", "content": "Who is Ada?"}
BODY: dict[str, Any] = {
    "input": [ASKED],
    "tools": [SPACE, {"type": "web_search"}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "seed": 3,
}


def test_a_call_has_its_namespace_whole_and_streamed(server: LiveServer) -> None:
    answer = server.post(PATH, BODY)
    assert answer.headers["x-onward-ignored"] == "tools[1]"
    (call,) = (item for item in answer.json()["output"] if item["type"] == "function_call")
    assert (call["namespace"], call["name"]) == ("crm", "find")
    assert call["arguments"] in ('{"name": "Ada"}', '{"name": "Ben"}')
    events = [json.loads(event) for event in server.stream(PATH, BODY).events]
    (streamed,) = (item for item in events[-1]["response"]["output"] if item["type"] == "function_call")
    assert (streamed["namespace"], streamed["name"]) == ("crm", "find")
    assert streamed["arguments"] == call["arguments"]
    (done,) = (event for event in events if event["type"] == "response.function_call_arguments.done")
    assert done["name"] == "find"


def test_a_call_is_read_back_as_that_of_the_function(server: LiveServer) -> None:
    called = {"arguments": '{"name": "Ada"}'}
    items = [
        ASKED,
        {"type": "function_call", "call_id": "1", "name": "find", "namespace": "crm", **called},
        {"type": "function_call_output", "call_id": "1", "output": "a customer"},
    ]
    more = {"tool_choice": "none", "max_output_tokens": 4}
    response = server.post(PATH, BODY | more | {"input": items}).json()
    calls = [{"id": "1", "type": "function", "function": {"name": "crm.find", **called}}]
    messages = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "a customer"},
    ]
    chat = server.post("/v1/chat/completions", {"messages": messages, "seed": 3, "max_tokens": 4}).json()
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_invalid_namespaces_are_refused_by_path(server: LiveServer) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{"type": "namespace", "name": "crm"}]}, "tools[0]"),
        ({"tools": [SPACE | {"tools": [{"type": "file_search"}]}]}, "tools[0].tools[0]"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "find", "namespace": 5}]}, "input[0].namespace"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ]
    for fields, param in cases:
        answer = server.post(PATH, BODY | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
