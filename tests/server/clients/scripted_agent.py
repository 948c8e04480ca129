"""A model with a long context that acts as an agent: it calls the tools that it knows, then reports their results.

It is a plain Python function of the tokens, with the demo's tokenizer and a template like Qwen3's. Its text depends
only on the prompt, so the answer shows what a client sends and sends back.
"""

import json
import re
import time
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

import onward
from onward.chat import ChatTemplate

TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}</tools>
Call as in <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}
{{- message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

COMMAND = "echo onward-works"
# The shells of agents, with arguments that do no harm.
SHELLS = {
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "shell": {"command": ["echo", "onward-works"]},
    "Bash": {"command": COMMAND, "description": "Say that it works"},
}
THOUGHT = "A tool knows."
CERTAIN, CONTEXT = 30.0, 2**18
STEP_SECONDS = 0.003  # so that a slow client, too, receives its tokens one by one
MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


def answer_to(prompt: str) -> str:
    """The answer to a rendered chat: calls of the tools that are offered and asked for, then what they returned."""
    tools, _, chat = prompt.rpartition("</tools>")
    messages = MESSAGE.findall(chat)
    results = []
    while messages and messages[-1][0] == "tool":
        results.insert(0, messages.pop()[1].strip())
    if results:
        return "It works: " + "; ".join(results)
    offered = re.findall(r'"name": "(\w+)"', tools)
    asked = next((text for role, text in reversed(messages) if role == "user"), "")
    calls = [("weather", {"city": city}) for city in ("Oslo", "Bergen") if city in asked and "weather" in offered]
    calls = calls or [(name, arguments) for name, arguments in SHELLS.items() if name in offered][:1]
    if not calls:
        return "Nothing is to be done."
    calls_json = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return f"<think>\n{THOUGHT}\n</think>\n\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls_json)


class Seen(NamedTuple):
    """A cache of the tokens themselves: int32 [B, S]."""

    tokens: Tensor

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def max_len(self) -> int:
        return self.tokens.shape[1]


def scripted_agent() -> onward.LanguageModel:
    demo = onward.load("demo")
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    begin, end = (tokenizer.encode(mark)[0] for mark in ("<|im_start|>", "<|im_end|>"))

    @lru_cache(maxsize=64)
    def script(prompt: bytes) -> list[int]:
        ids = torch.frombuffer(bytearray(prompt), dtype=torch.int32).tolist()
        marks = {begin: "<|im_start|>", end: "<|im_end|>"}
        text = b"".join(marks[id].encode() if id in marks else tokenizer.bytes_of(id) for id in ids).decode()
        return [*tokenizer.encode(answer_to(text), add_special_tokens=False), end]

    def following(ids: Tensor) -> int:
        starts = (ids == begin).nonzero()
        if not len(starts):
            return end
        # The answer begins after "<|im_start|>assistant\n".
        at = int(starts[-1]) + 1 + len(tokenizer.encode("assistant\n", add_special_tokens=False))
        answer = script(ids[:at].numpy().tobytes())
        return answer[len(ids) - at] if 0 <= len(ids) - at < len(answer) else end

    def forward(
        tokens: Tensor, offsets: Tensor, cache: Seen, params: object, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Seen]:
        rows, count = tokens.shape
        time.sleep(STEP_SECONDS)
        where = torch.arange(count).repeat(rows, 1) if logits_at is None else logits_at
        logits = torch.zeros(*where.shape, tokenizer.vocab_size)
        for row, offset in enumerate(offsets.tolist()):
            cache.tokens[row, offset : offset + count] = tokens[row]
            if row < len(where):
                for column, at in enumerate(where[row].tolist()):
                    logits[row, column, following(cache.tokens[row, : offset + at + 1])] = CERTAIN
        return logits, cache

    model = onward.Model(
        forward=forward,
        params=(),
        new_cache=lambda batch, max_len: Seen(torch.zeros(batch, max_len, dtype=torch.int32)),
        vocab_size=tokenizer.vocab_size,
        max_seq_len=CONTEXT,
        compiles=False,
    )
    return onward.LanguageModel(model, tokenizer, ChatTemplate(TEMPLATE, {}), demo.defaults)
