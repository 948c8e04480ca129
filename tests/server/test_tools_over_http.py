"""Tools through OpenAI's own client: whole and streamed, called and answered."""

from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer

import onward
from onward.chat import ChatTemplate

# In the manner of Qwen3's.
TEMPLATE = """\
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call></tool_call>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>

</think>

"""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Bergen"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
ASKED: list[Any] = [{"role": "user", "content": "Does it rain in Oslo?"}]


@pytest.fixture(scope="module")
def caller() -> Iterator[LiveServer]:
    demo = onward.load("demo")
    assert demo.chat_template is not None
    lm = onward.LanguageModel(demo.model, demo.tokenizer, ChatTemplate(TEMPLATE, {}), demo.defaults)
    with LiveServer({"demo": lm}) as server:
        yield server


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"]
)
def test_a_call_is_made_streamed_and_answered(caller: LiveServer, choice: Any) -> None:
    options: Any = {"model": "demo", "tools": [TOOL], "max_tokens": 400, "seed": 5, "temperature": 1.0}
    options |= {"parallel_tool_calls": False}
    with caller.openai() as client:
        whole = client.chat.completions.create(messages=ASKED, tool_choice=choice, **options)
        (only_choice,) = whole.choices
        assert only_choice.finish_reason == "tool_calls"
        assert only_choice.message.content is None
        assert only_choice.message.tool_calls
        (call,) = only_choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "weather"
        assert call.function.arguments.startswith('{"city": "')

        chunks = list(client.chat.completions.create(messages=ASKED, tool_choice=choice, stream=True, **options))
        streamed = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
        assert [(delta.id, delta.type) for delta in streamed if delta.id] == [(call.id, "function")]
        assert (
            "".join(delta.function.arguments or "" for delta in streamed if delta.function) == call.function.arguments
        )
        assert len(streamed) > 3, "arguments come as they are written"
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"

        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        messages = [*ASKED, only_choice.message, result]
        answer = client.chat.completions.create(messages=messages, tool_choice="none", **(options | {"max_tokens": 8}))
        assert answer.choices[0].message.tool_calls is None
        lm = caller.engines["demo"].lm
        back = [*ASKED, only_choice.message.model_dump(), result]
        assert answer.usage
        assert answer.usage.prompt_tokens == len(lm.chat_prompt(back)), "what the client sends back is read"


def test_invalid_tools_are_refused_by_name(caller: LiveServer) -> None:
    for tools, param in (([{"type": "function"}], "tools"), ([TOOL, TOOL], "tools")):
        answer = caller.post("/v1/chat/completions", {"messages": ASKED, "tools": tools})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
