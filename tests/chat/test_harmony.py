"""Answers of gpt-oss: several messages, each with a channel and possibly a recipient."""

from typing import Any

import pytest
from answers import ASKED, CLOCK, TEMPLATES, WEATHER, Chat, MarkTokenizer, answering, message, parsed
from hypothesis import given
from hypothesis import strategies as st
from test_constrained_calls import admitted

import onward
from onward.chat import AssistantMessage, ChatTemplate, ToolCall, format_of
from onward.testing import ByteTokenizer

# As the model's documentation describes it, in short.
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content ~ (tools or '') ~ '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
TOOLS = [WEATHER, CLOCK]
OSLO = '{"city": "Oslo"}'
ANALYSIS = "<|channel|>analysis<|message|>Rain?\nI look.<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OSLO}"
FINAL = "<|channel|>final<|message|>"
CALLED = (ToolCall("call 0", "weather", OSLO),)
MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
TOKENIZERS = [ByteTokenizer(), MarkTokenizer(marks=MARKS, vocab_size=258 + len(MARKS))]


def gpt_oss(text: str, tokenizer: ByteTokenizer) -> Chat:
    chat = answering("plain", text, tokenizer)
    lm = chat.lm
    return Chat(onward.LanguageModel(lm.model, tokenizer, ChatTemplate(TEMPLATE, {}), lm.defaults), chat.answers)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{FINAL}Yes.\n<|return|>", AssistantMessage("Yes.\n")),
        (f"{ANALYSIS}{FINAL} It rains.", AssistantMessage(" It rains.", "Rain?\nI look.")),
        (f"{ANALYSIS}{CALL}<|call|>", AssistantMessage(None, "Rain?\nI look.", CALLED)),
        (f"{CALL}", AssistantMessage(None, None, CALLED)),
        (
            f" to=functions.weather<|channel|>commentary json<|message|>{OSLO}<|call|>",
            AssistantMessage(None, None, CALLED),
        ),
        (
            f"{ANALYSIS}<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant{CALL}<|call|>",
            AssistantMessage("I look it up.", "Rain?\nI look.", CALLED),
        ),
        (
            f"{ANALYSIS}<|channel|>analysis<|message|>Again.<|end|><|start|>assistant{FINAL}A<|end|><|start|>assistant{FINAL}B",
            AssistantMessage("A\n\nB", "Rain?\nI look.\n\nAgain."),
        ),
        (
            f"{CALL}<|call|><|start|>assistant<|channel|>commentary to=functions.clock<|message|>{{}}<|call|>",
            AssistantMessage(None, None, (*CALLED, ToolCall("call 1", "clock", "{}"))),
        ),
        # Tools that the model has by itself are not ours to run.
        (
            "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
            AssistantMessage(None, "print(1)"),
        ),
        # Text without a header is content, and so is an incomplete header.
        ("It rains, to=you.\n", AssistantMessage("It rains, to=you.\n")),
        ("", AssistantMessage("")),
        ("<|channel|>fin", AssistantMessage("<|channel|>fin")),
        (f"{ANALYSIS}<|channel|>", AssistantMessage("<|start|>assistant<|channel|>", "Rain?\nI look.")),
        ("<|channel|>analysis<|message|>Hm", AssistantMessage(None, "Hm")),
    ],
)
def test_texts_and_their_messages(text: str, expected: AssistantMessage) -> None:
    assert message("harmony", text) == expected
    assert parsed("harmony", list(text))[1] == expected


def test_a_call_is_content_without_tools() -> None:
    assert message("harmony", f"{ANALYSIS}{CALL}", tools=None) == AssistantMessage(OSLO, "Rain?\nI look.")


def test_the_prompt_may_open_the_reasoning() -> None:
    text = f"Hm.<|end|><|start|>assistant{FINAL}Yes."
    assert message("harmony", text, thinking=True) == AssistantMessage("Yes.", "Hm.")


_PARTS = [*MARKS, "assistant", "analysis", "final", " to=", "functions.", "weather", " json", OSLO, "\n", "a"]


@given(
    st.lists(st.sampled_from(_PARTS), max_size=14), st.booleans(), st.sampled_from([None, (), ("weather",)]), st.data()
)
def test_message_does_not_depend_on_the_chunks(
    parts: list[str], thinking: bool, tools: tuple[str, ...] | None, data: st.DataObject
) -> None:
    text = "".join(parts)
    whole = message("harmony", text, thinking=thinking, tools=tools)
    cut = data.draw(st.integers(0, len(text)))
    for pieces in (parts, list(text), [text[:cut], text[cut:]]):
        assert parsed("harmony", pieces, thinking=thinking, tools=tools)[1] == whole


def test_the_template_determines_the_format() -> None:
    assert format_of(TEMPLATE).name == "harmony"
    assert all(format_of(template).name != "harmony" for template in TEMPLATES.values())


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["text", "special tokens"])
def test_an_answer_is_rendered_in_the_next_chat(tokenizer: ByteTokenizer) -> None:
    chat = gpt_oss(f"{ANALYSIS}{CALL}", tokenizer)
    answer = chat.chat(tools=TOOLS)
    assert answer.message is not None
    assert answer.message.reasoning == "Rain?\nI look."
    assert answer.message.tool_calls[0].parsed == {"city": "Oslo"}
    assert ("<|" in answer.text) == (tokenizer is TOKENIZERS[0]), "special tokens are no text"
    result = {"role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "rain"}
    assert chat.lm.chat_template is not None
    text = chat.lm.chat_template.render(
        onward.chat.template_messages([*ASKED, answer.message, result], arguments_as_text=False)
    )
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Rain?\nI look.<|end|><|start|>assistant to=functions.weather"
        f"<|channel|>commentary json<|message|>{OSLO}<|call|>"
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"rain"<|end|><|start|>assistant'
    )
    pieces = list(chat.lm.stream_chat(ASKED, tools=TOOLS))
    assert AssistantMessage.of(piece.message for piece in pieces if piece.message) == answer.message


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["text", "special tokens"])
def test_required_calls(tokenizer: ByteTokenizer) -> None:
    chat = gpt_oss("", tokenizer)

    def of(text: str, **options: Any) -> str:
        return admitted(chat.request(tools=TOOLS, **options), tokenizer, text)

    for text in (CALL, ANALYSIS + CALL):
        assert of(text, tool_choice="required") == text + "$"
        assert of(text, tool_choice="weather") == text + "$"
        assert not of(text.replace("city", "town"), tool_choice="required").endswith("$")
        assert of(text, parallel_tool_calls=False) == text + "$"
    assert not of(f"{FINAL}No.", tool_choice="required").endswith("$")
    assert of(f"{ANALYSIS}{FINAL}No.", parallel_tool_calls=False) == f"{ANALYSIS}{FINAL}No.$"


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["text", "special tokens"])
def test_constraints_apply_to_the_final_message(tokenizer: ByteTokenizer) -> None:
    chat = gpt_oss(f'{ANALYSIS}{FINAL}{{"a": 1}}', tokenizer)
    answer = chat.chat(json_schema={"type": "object"})
    assert answer.message == AssistantMessage('{"a": 1}', "Rain?\nI look.")
    assert answer.parsed == {"a": 1}
    for text in (f"{FINAL}ab", f"{ANALYSIS}{FINAL}ab"):
        assert admitted(chat.request(regex="ab"), tokenizer, text) == text + "$"
    assert not admitted(chat.request(regex="ab"), tokenizer, "ab").endswith("b$")
