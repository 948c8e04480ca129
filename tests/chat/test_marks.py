"""Marks in real tokenizers: special tokens, added tokens that are text, and marks of several tokens."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from answers import ASKED, CLOCK, TEMPLATES, WEATHER, Answers

import onward
from onward.chat import FORMATS, AnswerFormat, AssistantMessage, ChatTemplate
from onward.constraints import Lark
from onward.decoding import Sequence
from onward.sampling.constraint import admits
from onward.testing import scripted_model
from onward.tokenizer import JsonTokenizer, StopStrings, StreamingDetokenizer

DEMO = Path(onward.__file__).parent / "demo" / "target"
TOOLS = [WEATHER, CLOCK]
TEXTS = {
    "hermes": '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "mistral-args": '[THINK]Hm.[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
}


@pytest.fixture(scope="module")
def tokenizer() -> JsonTokenizer:
    """The demo model's with Mistral's marks as special tokens, and Qwen's as added tokens that are text."""
    inner = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    inner.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"])
    inner.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return JsonTokenizer(inner, json.loads((DEMO / "tokenizer_config.json").read_text()))


def answering(format: str, tokenizer: JsonTokenizer) -> onward.LanguageModel:
    answers = Answers(tokenizer, TEXTS[format])
    template = ChatTemplate(TEMPLATES[format], {"bos_token": "", "eos_token": ""})
    options = onward.GenerateOptions(max_new_tokens=200, eos=tokenizer.eos_id)
    lm = onward.LanguageModel(scripted_model(answers, vocab_size=tokenizer.vocab_size), tokenizer, template, options)
    answers.prompt_length = len(lm.chat_request(ASKED, tools=TOOLS).prompt)
    return lm


@pytest.mark.parametrize("format", TEXTS)
def test_marks_in_text_or_special_tokens_are_read(format: str, tokenizer: JsonTokenizer) -> None:
    lm = answering(format, tokenizer)
    reading = lm.chat_request(ASKED, tools=TOOLS).answer
    assert reading is not None
    assert len(reading.marks) == (0 if format == "hermes" else 5), "those that the text has are none"
    whole = lm.chat(ASKED, tools=TOOLS)
    assert whole.message is not None
    assert (whole.message.content, whole.message.reasoning) == (None, "Hm.")
    assert whole.message.tool_calls[0].parsed == {"city": "Oslo"}
    assert ("<think>" in whole.text) == (format == "hermes")
    assert "[" not in whole.text
    pieces = list(lm.stream_chat(ASKED, tools=TOOLS))
    assert AssistantMessage.of(piece.message for piece in pieces if piece.message) == whole.message


@pytest.mark.parametrize("options", [{"tool_choice": "required"}, {"parallel_tool_calls": False}], ids=str)
@pytest.mark.parametrize("format", TEXTS)
def test_a_constraint_admits_the_tokens_of_marks(
    format: str, options: dict[str, Any], tokenizer: JsonTokenizer
) -> None:
    lm = answering(format, tokenizer)
    request = lm.chat_request(ASKED, tools=TOOLS, **options)
    constraint = request.options.new_constraint(tokenizer)
    assert constraint is not None
    for token in tokenizer.encode(TEXTS[format], add_special_tokens=False):
        assert admits(constraint.mask(), token), tokenizer.tokens()[token]
        constraint.accept(token)
    assert constraint.is_done or admits(constraint.mask(), tokenizer.eos_id or 0)
    assert lm.generate(request).text == lm.chat(ASKED, tools=TOOLS).text


def test_requests_are_values(tokenizer: JsonTokenizer) -> None:
    lm = answering("mistral-args", tokenizer)
    for options in ({}, {"tool_choice": "required"}):
        request = lm.chat_request(ASKED, tools=TOOLS, **options)
        assert request == lm.chat_request(ASKED, tools=TOOLS, **options)
        assert pickle.loads(pickle.dumps(request)) == copy.deepcopy(request) == request
        assert lm.generate(pickle.loads(pickle.dumps(request))).message == lm.chat(ASKED, tools=TOOLS).message
        assert isinstance(request.options.constrained_by, Lark) == bool(options)
    message = lm.chat(ASKED, tools=TOOLS).message
    assert pickle.loads(pickle.dumps(message)) == message
    assert copy.copy(lm).message_format == lm.message_format == FORMATS["mistral-args"]


def test_marks_stay_at_the_position_of_their_tokens() -> None:
    """Also if the text before them is delayed: half a character, or the beginning of a stop string."""
    texts = {1: b"ab", 2: b"\xc3", 3: b"\xa9", 4: b"st"}

    def decode(ids: list[int]) -> str:
        return b"".join(texts.get(id, b"") for id in ids).decode("utf-8", "replace")

    def marks(*ids: int) -> list[tuple[int, int]]:
        stream = StopStrings(StreamingDetokenizer(decode), ["stop"], {9: "[M]"})  # type: ignore[arg-type]
        sequence = Sequence([0], 100, text=stream)
        for id in ids:
            sequence.accept(id)
        fork = sequence.fork()
        fork.accept(9)
        assert len(fork.marks) == len(sequence.marks) + 1, "a fork continues independently"
        return [(mark.position, mark.at) for mark in sequence.marks]

    assert marks(9, 1, 9) == [(0, 0), (2, 2)]
    assert marks(1, 4, 9, 1) == [(4, 2)], "'st' is delayed, but precedes the mark"
    assert marks(2, 3, 9) == [(1, 2)]


def test_call_marks_are_read_only_with_tools(tokenizer: JsonTokenizer) -> None:
    of = AnswerFormat.of(FORMATS["mistral-args"], tokenizer, "", None)
    assert [text for _, text in of.marks] == ["[THINK]", "[/THINK]"]
