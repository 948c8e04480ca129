"""Anthropic's own client with the server: sync, async, its stream helper and its tool runner."""

import json
import subprocess
import sys
from typing import Any

import pytest
from environments import ENVIRONMENT
from live_server import LiveServer

import onward
from onward.chat import ChatTemplate
from onward.testing import ByteTokenizer, scripted_model

pytest.importorskip("anthropic", reason="anthropic is missing: run `make clients`")


def run(program: str, server: LiveServer) -> Any:
    """The JSON output of a program that starts with ANTHROPIC."""
    done = subprocess.run(
        [sys.executable, "-c", ANTHROPIC + program, server.url],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout)


ANTHROPIC = """
import asyncio, json, sys
import anthropic
url, key = sys.argv[1], "none"
options = dict(model="demo", max_tokens=12, messages=[{"role": "user", "content": "Hi"}])
options |= dict(system="Be kind.", extra_body={"seed": 3, "temperature": 1.0})
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, _strict_response_validation=True)
"""


def test_anthropics_client_reads_messages_and_streams(server: LiveServer, lm: onward.LanguageModel) -> None:
    program = """
whole = client.messages.create(**options)
events = list(client.messages.create(stream=True, **options))
with client.messages.stream(**options) as stream:
    helped = "".join(stream.text_stream)
    final = stream.get_final_message()
counted = client.messages.count_tokens(model="demo", system="Be kind.", messages=options["messages"])

async def asked():
    async with anthropic.AsyncAnthropic(base_url=url, auth_token=key, max_retries=0) as other:
        alone = await other.messages.create(**options)
        async with other.messages.stream(**options) as stream:
            return alone.content[0].text, "".join([text async for text in stream.text_stream])

try:
    client.messages.create(**{**options, "model": "claude"})
except anthropic.NotFoundError as error:
    refused = [error.type, error.request_id is not None]
deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
texts = [whole.content[0].text, "".join(deltas), helped, final.content[0].text, *asyncio.run(asked())]
total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
print(json.dumps([texts, whole.stop_reason, total, counted.input_tokens, final.usage.output_tokens, refused]))
"""
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    alone = lm.chat(asked, max_new_tokens=12, seed=3, temperature=1.0)
    texts, reason, total, counted, tokens, refused = run(program, server)
    assert set(texts) == {alone.text}
    assert reason == "max_tokens"
    assert total == counted == alone.prompt_tokens
    assert tokens == 12
    assert refused == ["not_found_error", True]


# Calls the weather once, and then repeats the result, with reasoning before both.
AGENT = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call></tool_call>{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %} calls {{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}assistant:"""
CALL = '<think>I ask.</think>Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HEARD = "<think>I know.</think>It rains."


def test_anthropics_tool_runner_runs_tools() -> None:
    tokenizer = ByteTokenizer()

    def script(ids: list[int]) -> int:
        asked, _, said = tokenizer.decode(ids).rpartition("assistant:")
        answer = tokenizer.encode(HEARD if "tool: rain in Oslo" in asked else CALL)
        done = len(tokenizer.encode(said))
        return answer[done] if done < len(answer) else tokenizer.eos_id

    model = scripted_model(script, vocab_size=tokenizer.vocab_size, max_seq_len=4096)
    defaults = onward.GenerateOptions(eos=tokenizer.eos_id, temperature=0)
    lm = onward.LanguageModel(model, tokenizer, ChatTemplate(AGENT, {}), defaults)
    program = """
from anthropic import beta_tool

@beta_tool
def weather(city: str) -> str:
    \"\"\"The weather in a city.\"\"\"
    return f"rain in {city}"

del options["system"], options["extra_body"]
options |= dict(max_tokens=300, thinking={"type": "enabled", "budget_tokens": 1024}, tools=[weather])
messages = []
for message in client.beta.messages.tool_runner(**options):
    messages.append([[block.type for block in message.content], message.stop_reason])
streamed = []
for stream in client.beta.messages.tool_runner(stream=True, **options):
    streamed.append([event.type for event in stream if event.type in ("text", "thinking", "input_json")][-1])
final = stream.get_final_message()
print(json.dumps([messages, streamed, [message.content[0].thinking, message.content[1].text, final.content[1].text]]))
"""
    with LiveServer({"demo": lm}) as server:
        messages, streamed, said = run(program, server)
    assert messages == [[["thinking", "text", "tool_use"], "tool_use"], [["thinking", "text"], "end_turn"]]
    assert streamed == ["input_json", "text"]
    assert said == ["I know.", "It rains.", "It rains."]
