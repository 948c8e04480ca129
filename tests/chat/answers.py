"""Chat templates of the families, written from their documentation, and models that answer with a given text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onward
from onward.chat import FORMATS, AssistantMessage, ChatTemplate, MessageDelta, MessageParser
from onward.testing import ByteTokenizer, scripted_model

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nWrite <tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for tool_call in message.tool_calls or [] %}
        {%- set tool_call = tool_call.function %}
        {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
        {%- if tool_call.arguments is string %}
            {{- tool_call.arguments }}
        {%- else %}
            {{- tool_call.arguments | tojson }}
        {%- endif %}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- elif opens_thinking %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if tools %}
    {{- 'Answer with {"name": function name, "parameters": dictionary of names and values}.' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

LATER_MISTRAL = MISTRAL.replace(
    """(call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ')""",
    """'[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson""",
).replace(
    """{{- message.content + eos_token }}""",
    """{{- '[THINK]' + message.reasoning + '[/THINK]' if message.reasoning }}{{- message.content + eos_token }}""",
)

PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"

TEMPLATES = {
    "hermes": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral-args": LATER_MISTRAL,
    "plain": PLAIN,
}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
ASKED = [{"role": "user", "content": "Does it rain in Oslo?"}]

_SPECIAL = 258


@dataclass(frozen=True)
class MarkTokenizer(ByteTokenizer):
    """Bytes, and special tokens that decoding leaves out of the text."""

    marks: tuple[str, ...] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>")
    vocab_size: int = _SPECIAL + 6

    def token_bytes(self) -> list[bytes | None]:
        return [*super().token_bytes()[:_SPECIAL], *[None] * len(self.marks)]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        for at, mark in enumerate(self.marks):
            before, found, after = text.partition(mark)
            if found:
                return [*self.encode(before), _SPECIAL + at, *self.encode(after)]
        return super().encode(text, add_special_tokens=add_special_tokens)


class Answers:
    """A script: every prompt is answered with `text`, then with the end."""

    def __init__(self, tokenizer: ByteTokenizer, text: str) -> None:
        self._ids = [*tokenizer.encode(text), tokenizer.eos_id]
        self.prompt_length = 0

    def __call__(self, history: list[int]) -> int:
        return self._ids[min(max(0, len(history) - self.prompt_length), len(self._ids) - 1)]


def answering(format: str, text: str, tokenizer: ByteTokenizer | None = None, **variables: Any) -> "Chat":
    """A model with the template of a family, which answers `ASKED` with `text`."""
    tokenizer = tokenizer or ByteTokenizer()
    answers = Answers(tokenizer, text)
    model = scripted_model(answers, vocab_size=tokenizer.vocab_size)
    template = ChatTemplate(TEMPLATES[format], {"bos_token": "<s>", "eos_token": "</s>"})
    options = onward.GenerateOptions(max_new_tokens=500, eos=tokenizer.eos_id)
    return Chat(onward.LanguageModel(model, tokenizer, template, options), answers)


@dataclass
class Chat:
    """A language model whose answers begin where the prompt of a chat ends."""

    lm: onward.LanguageModel
    answers: Answers

    def request(self, messages: Any = ASKED, **options: Any) -> onward.Request:
        request = self.lm.chat_request(messages, **options)
        self.answers.prompt_length = len(request.prompt)
        return request

    def chat(self, messages: Any = ASKED, **options: Any) -> onward.Completion:
        self.request(messages, **options)
        return self.lm.chat(messages, **options)


def parsed(
    format: str, parts: Sequence[str], tools: Sequence[str] | None = ("weather", "clock"), thinking: bool = False
) -> tuple[list[MessageDelta], AssistantMessage]:
    """The deltas of a text that comes in parts, one for each part, and the message."""
    parser = MessageParser(FORMATS[format], "call {}".format, tools, thinking)
    deltas = []
    for part in parts:
        parser.feed(part)
        deltas.append(parser.take())
    parser.finish()
    deltas.append(parser.take())
    return deltas, AssistantMessage.of(deltas)


def message(format: str, text: str, **options: Any) -> AssistantMessage:
    return parsed(format, [text], **options)[1]
