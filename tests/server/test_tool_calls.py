"""Tool calls in chunks, with logprobs and ids, and as items of responses."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import MESSAGES, LiveServer, deltas

import onward
from onward.chat import ChatTemplate

# In the manner of Qwen3's.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call></tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"sky": {"enum": ["rain", "sun"]}}, "required": ["sky"]}
PARAMETERS["additionalProperties"] = False
TOOL = {"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}}
# Only one call, because a small model would make more and more calls.
ONE_CALL: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
FORCED = {"messages": MESSAGES, "max_tokens": 300, "seed": 3, **ONE_CALL}


@pytest.fixture(scope="module")
def server(lm: onward.LanguageModel) -> Iterator[LiveServer]:
    with LiveServer({"demo": onward.LanguageModel(lm.model, lm.tokenizer, ChatTemplate(TEMPLATE, {}))}) as live:
        yield live


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that the deltas add up to. The first of a call has its id, its type and its name."""
    calls: list[dict[str, Any]] = []
    for choice in deltas(chunks):
        for delta in choice["delta"].get("tool_calls", ()):
            if delta["index"] == len(calls):
                assert delta["type"] == "function"
                calls.append({"id": delta["id"], "type": "function", "function": {**delta["function"]}})
            else:
                assert set(delta) == {"index", "function"}
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}], ids=len)
def test_a_required_call_is_streamed_in_deltas(server: LiveServer, logprobs: dict[str, Any]) -> None:
    whole = server.post("/v1/chat/completions", FORCED | logprobs)
    assert whole.status_code == 200, whole.text
    (choice,) = whole.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert calls
    for call in calls:
        assert call["function"]["name"] == "forecast"
        assert json.loads(call["function"]["arguments"])["sky"] in ("rain", "sun")
    stream = server.stream("/v1/chat/completions", FORCED | logprobs)
    assert joined(stream.chunks) == calls
    parts = list(deltas(stream.chunks))
    assert parts[-1]["finish_reason"] == "tool_calls"
    assert sum("role" in part["delta"] for part in parts) == 1
    if logprobs:
        assert [token for part in parts for token in part.get("token_ids", ())] == choice["token_ids"]
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]


def test_responses_have_calls_as_items(server: LiveServer) -> None:
    tool: Any = {"type": "function", "name": "forecast", "parameters": PARAMETERS, "strict": True}
    options: Any = {"model": "demo", "max_output_tokens": 300, **ONE_CALL, "tools": [tool]}
    options |= {"input": "Tell me a story.", "extra_body": {"seed": 3}}
    with server.openai() as client:
        response = client.responses.create(**options)
        calls = [item for item in response.output if item.type == "function_call"]
        assert json.loads(calls[0].arguments)["sky"] in ("rain", "sun")
        events = list(client.responses.create(stream=True, **options))
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == "".join(call.arguments for call in calls)
        done: Any = [{"type": "function_call_output", "call_id": calls[0].call_id, "output": "dry"}]
        asked: Any = [{"role": "user", "content": "Tell me a story."}, *(item.model_dump() for item in response.output)]
        again = client.responses.create(model="demo", input=asked[:2] + done, max_output_tokens=4, tools=[tool])
        assert again.output_text is not None
