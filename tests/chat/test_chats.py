"""Chats with tools and reasoning, end to end: streamed == whole == engine == OpenAI's bodies, over scripted models."""

import json
from typing import Any

import pytest
from answers import ASKED, CLOCK, TEMPLATES, WEATHER, MarkTokenizer, answering
from hypothesis import given, settings
from hypothesis import strategies as st

import onward
from onward.chat import (
    FORMATS,
    AssistantMessage,
    MessageBuilder,
    MessageDelta,
    MessageFormat,
    Reading,
    TextReader,
    ToolCall,
)
from onward.chat.formats.json_calls import Hermes
from onward.errors import RequestError
from onward.protocols import BodyReader
from onward.protocols.chat import delta_body
from onward.protocols.choices import finish_reason

TOOLS = [WEATHER, CLOCK]
OSLO = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
THOUGHT = f"<think>\nOslo?\n</think>\n\nI look.\n{CALL}"
TEXTS = {
    "hermes": THOUGHT,
    "llama3": '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}',
    "mistral": '[THINK]Oslo?[/THINK]I look.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "mistral-args": 'I look.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
}


def message_of(completion: onward.Completion) -> AssistantMessage:
    assert completion.message is not None
    return completion.message


def without_ids(message: AssistantMessage) -> tuple[Any, ...]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


def fold(pieces: list[onward.Piece]) -> AssistantMessage:
    deltas = [piece.message for piece in pieces]
    assert all(isinstance(delta, MessageDelta) for delta in deltas)
    return AssistantMessage.of(delta for delta in deltas if delta is not None)


@pytest.mark.parametrize("tokenizer", [None, MarkTokenizer()], ids=["text", "special tokens"])
@pytest.mark.parametrize("format", TEXTS)
def test_stream_chat_engine_and_openai_agree(format: str, tokenizer: MarkTokenizer | None) -> None:
    text = TEXTS[format]
    chat = answering(format, text, tokenizer)
    assert chat.lm.message_format.name == format
    whole = chat.chat(tools=TOOLS)
    plain = chat.lm.generate(chat.lm.chat_prompt(ASKED, {"tools": TOOLS}))
    assert whole.text == plain.text, "the text is what it is without the message"
    assert plain.message is None
    content = None if format == "llama3" else "I look."
    reasoning = "Oslo?" if "Oslo?" in text else None
    assert without_ids(message_of(whole)) == (content, reasoning, [("weather", OSLO)])
    pieces = list(chat.lm.stream_chat(ASKED, tools=TOOLS))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert fold(pieces) == message_of(whole)
    with onward.Engine(chat.lm) as engine:
        generation = engine.submit(messages=ASKED, tools=TOOLS)
        assert fold(list(generation)) == message_of(whole) == message_of(generation.result())
    assert fold(list(onward.Session(chat.lm).stream_chat(ASKED, tools=TOOLS))) == message_of(whole)
    body = BodyReader(chat.lm, "m").read("/v1/chat/completions", {"messages": ASKED, "tools": TOOLS})
    assert body.requests == (chat.lm.chat_request(ASKED, tools=TOOLS),)
    (choice,) = body.protocol.answer(body, [whole])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = message_of(whole).tool_calls
    function = {"name": "weather", "arguments": OSLO}
    assert choice["message"]["content"] == content
    assert choice["message"]["tool_calls"] == [{"id": call.id, "type": "function", "function": function}]
    assert choice["message"].get("reasoning") == choice["message"].get("reasoning_content") == reasoning


def test_special_tokens_are_in_the_message_but_not_in_the_text() -> None:
    chat = answering("mistral", TEXTS["mistral"], MarkTokenizer())
    whole = chat.chat(tools=TOOLS)
    assert whole.text == 'Oslo?I look.[{"name": "weather", "arguments": {"city": "Oslo"}}]'
    assert chat.chat().message == AssistantMessage(whole.text.removeprefix("Oslo?"), "Oslo?"), "no tools, no calls"


@pytest.mark.parametrize("stop", ["look", "I l", "wea", ": {", "Oslo?I", "Oslo?]"])
def test_a_stop_string_ends_message_and_text_at_the_same_place(stop: str) -> None:
    """Text that is delayed for a stop string passes through the parser too, with the marks in their places."""
    chat = answering("mistral", TEXTS["mistral"], MarkTokenizer())
    whole = chat.chat(tools=TOOLS, stop=stop)
    unstopped = chat.chat(tools=TOOLS)
    assert whole.text == unstopped.text.split(stop)[0]
    assert fold(list(chat.lm.stream_chat(ASKED, tools=TOOLS, stop=stop))) == message_of(whole)
    expected = {
        "look": ("I ", "Oslo?", []),
        "I l": (None, "Oslo?", []),
        "wea": ('I look.[TOOL_CALLS][{"name": "', "Oslo?", []),
        ": {": ("I look.", "Oslo?", [("weather", "")]),
        "Oslo?I": ("", None, []),
        "Oslo?]": ("I look.", "Oslo?", [("weather", OSLO)]),
    }
    assert without_ids(message_of(whole)) == expected[stop]


def test_the_last_piece_flushes_delayed_text() -> None:
    for text, options in (("Hi <tool_", {}), ("Hi <tool_call>{", {}), ("Hi <tool_call>x", {"max_new_tokens": 10})):
        chat = answering("hermes", text)
        whole = chat.chat(tools=TOOLS, **options)
        assert message_of(whole).content == whole.text
        assert fold(list(chat.lm.stream_chat(ASKED, tools=TOOLS, **options))) == message_of(whole)


@given(
    st.lists(
        st.sampled_from([*TEXTS["mistral"].partition("[TOOL_CALLS]"), "[ARGS]", "é", "🦊", "ab", " "]), max_size=6
    ),
    st.lists(st.text("ab [é", min_size=1, max_size=3), max_size=2),
    st.integers(1, 60),
)
@settings(max_examples=60)
def test_stream_equals_chat_with_stop_strings_and_marks(parts: list[str], stop: list[str], tokens: int) -> None:
    chat = answering("mistral-args", "".join(parts), MarkTokenizer())
    whole = chat.chat(tools=TOOLS, stop=stop, max_new_tokens=tokens)
    assert fold(list(chat.lm.stream_chat(ASKED, tools=TOOLS, stop=stop, max_new_tokens=tokens))) == message_of(whole)
    searched = chat.chat(tools=TOOLS, stop=stop, max_new_tokens=tokens, beams=2, early_stopping=True)
    if searched.token_ids == whole.token_ids:
        assert without_ids(message_of(searched)) == without_ids(message_of(whole))


def test_speculative_pieces_equal_plain_ones() -> None:
    chat = answering("mistral", TEXTS["mistral"] * 2, MarkTokenizer())
    chat.request(tools=TOOLS)
    options: Any = {"tools": TOOLS, "stop": ["Oslo?]!"]}
    plain = list(chat.lm.stream_chat(ASKED, **options))
    assert list(chat.lm.stream_chat(ASKED, draft="lookup", **options)) == plain


def test_every_choice_has_a_message_and_the_ids_of_its_text() -> None:
    chat = answering("hermes", THOUGHT)
    whole = chat.chat(tools=TOOLS, n=3, temperature=0.1, seed=5)
    ids = [message_of(choice).tool_calls[0].id for choice in whole.choices]
    assert len(set(ids)) == 3
    assert all(len(id) == 29 and id.startswith("call_") for id in ids)
    assert [message_of(choice) for choice in chat.chat(tools=TOOLS, n=3, temperature=0.1, seed=5).choices] == [
        message_of(choice) for choice in whole.choices
    ]
    again = chat.chat(tools=TOOLS, temperature=0.1, seed=whole.choices[1].seed)
    assert message_of(again).tool_calls[0].id == ids[1]
    (call,) = message_of(answering("mistral", TEXTS["mistral"]).chat(tools=TOOLS)).tool_calls
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_thinking_is_read_only_if_the_template_enables_it() -> None:
    chat = answering("hermes", "Hm.\n</think>\n\nYes.")
    assert without_ids(message_of(chat.chat(opens_thinking=True))) == ("Yes.", "Hm.", [])
    assert message_of(chat.chat(enable_thinking=False)).content == chat.chat(enable_thinking=False).text


# ── continued conversations ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("format", TEXTS)
def test_answers_and_tool_results_are_messages(format: str) -> None:
    chat = answering(format, TEXTS[format])
    answer = message_of(chat.chat(tools=TOOLS))
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "rain"}
    prompt = chat.lm.chat_prompt([*ASKED, answer, result], {"tools": TOOLS})
    # A client of OpenAI's API sends the same as dicts, with the arguments as text or as an object.
    sent = answer.to_dict()
    assert chat.lm.chat_prompt([*ASKED, sent, result], {"tools": TOOLS}) == prompt
    sent["tool_calls"][0]["function"]["arguments"] = {"city": "Oslo"}
    assert chat.lm.chat_prompt([*ASKED, sent, result], {"tools": TOOLS}) == prompt
    text = chat.lm.decode(prompt)
    assert OSLO in text
    assert '"{' not in text, "arguments are no text inside of JSON"
    assert "None" not in text
    if format == "hermes":
        assert f"<think>\nOslo?\n</think>\n\nI look.\n{CALL}<|im_end|>" in text


def test_text_only_templates_get_the_original_argument_text() -> None:
    odd = '{"city":\t"Oslo"}'
    chat = answering("hermes", CALL.replace(OSLO, odd))
    answer = message_of(chat.chat(tools=TOOLS))
    assert answer.tool_calls[0].arguments == odd
    assert odd in chat.lm.decode(chat.lm.chat_prompt([*ASKED, answer]))


def test_keys_with_null_values_are_ignored() -> None:
    lm = answering("llama3", "").lm
    answer = {"role": "assistant", "content": "Hi.", "tool_calls": None, "refusal": None, "reasoning": None}
    plain = {"role": "assistant", "content": "Hi."}
    assert lm.chat_prompt([*ASKED, answer, *ASKED]) == lm.chat_prompt([*ASKED, plain, *ASKED])
    empty = {"role": "assistant", "content": None, "tool_calls": []}
    assert lm.chat_prompt([*ASKED, empty]) == lm.chat_prompt([*ASKED, {"role": "assistant", "content": ""}])


def test_tool_results_get_the_name_of_the_tool() -> None:
    from onward.chat import ChatTemplate

    template = ChatTemplate("{% for message in messages %}{{ message.name }};{% endfor %}", {})
    lm = onward.LanguageModel(answering("hermes", "").lm.model, MarkTokenizer(), template)
    answer = AssistantMessage(None, None, (ToolCall("1", "weather", "{}"),))
    results = [{"role": "tool", "tool_call_id": id, "content": "x"} for id in ("1", "2")]
    assert lm.decode(lm.chat_prompt([answer, *results])) == ";weather;;"


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ("weather", r"messages\[1\]\.tool_calls must be a list"),
        ([5], r"messages\[1\]\.tool_calls\[0\] must be"),
        ([{"function": {}}], r"messages\[1\]\.tool_calls\[0\] must be"),
        ([{"function": {"name": "f", "arguments": 5}}], r"tool_calls\[0\]\.function\.arguments must be"),
    ],
)
def test_calls_in_messages_are_checked(calls: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        answering("hermes", "").lm.chat_prompt([*ASKED, {"role": "assistant", "tool_calls": calls}])


# ── options and formats ───────────────────────────────────────────────────────────────────────────────────────


def test_the_format_is_detected_or_set_explicitly() -> None:
    for format in TEMPLATES:
        assert answering(format, "").lm.message_format == FORMATS[format]
    lm = answering("plain", "").lm
    for name in ("hermes", Hermes()):
        other = onward.LanguageModel(lm.model, lm.tokenizer, lm.chat_template, message_format=name)
        assert other.message_format == other.with_model(lm.model).message_format == Hermes()
    with pytest.raises(
        RequestError,
        match=r"message_format must be one of hermes, qwen3-coder, glm, .*, llama3, plain",
    ):
        onward.LanguageModel(lm.model, message_format="chatml")
    # Families that have something else between the same marks.
    for other_marks, name in (("<function=", "qwen3-coder"), ("<arg_key>", "glm")):
        template = onward.chat.ChatTemplate(TEMPLATES["hermes"] + other_marks, {})
        assert onward.LanguageModel(lm.model, lm.tokenizer, template).message_format.name == name


class Failing(MessageFormat):
    name = "failing"
    openers = ("@",)

    def is_of(self, template: str) -> bool:
        return False

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        yield from source.peek()
        raise ValueError("no such call")


def test_a_failing_format_ends_its_request_alone() -> None:
    chat = answering("hermes", "I look. @weather")
    parts = chat.lm.model, chat.lm.tokenizer, chat.lm.chat_template, chat.lm.defaults
    lm = onward.LanguageModel(*parts, message_format=Failing())
    chat.answers.prompt_length = len(lm.chat_request(ASKED, tools=TOOLS).prompt)
    with onward.Engine(lm) as engine:
        fails = engine.submit(messages=ASKED, tools=TOOLS)
        plain = engine.submit(messages=ASKED, tool_choice="none", tools=TOOLS, max_new_tokens=3)
        with pytest.raises(ValueError, match="no such call"):
            fails.result(60)
        assert plain.result(60).message is not None
        assert engine.submit(messages=ASKED, max_new_tokens=3).result(60).finish_reason == "length"


def test_tools_are_refused_if_the_template_ignores_them() -> None:
    chat = answering("plain", "")
    with pytest.raises(RequestError, match="template does not read tools"):
        chat.chat(tools=TOOLS)
    chat.chat(tools=[])
    chat.chat(tools=TOOLS, tool_choice="none")


def test_tool_choice_none_renders_no_tools_and_reads_no_calls() -> None:
    chat = answering("hermes", CALL)
    assert chat.request(tools=TOOLS, tool_choice="none") == chat.request()
    assert message_of(chat.chat(tools=TOOLS, tool_choice="none")) == AssistantMessage(CALL)


def test_tools_passed_only_to_the_template_are_not_checked() -> None:
    chat = answering("llama3", '{"name": "any", "parameters": {}}')
    assert without_ids(message_of(chat.chat(template={"tools": ["any shape"]}))) == (None, None, [("any", "{}")])


# ── OpenAI's format ───────────────────────────────────────────────────────────────────────────────────────────


def test_deltas_in_openais_format() -> None:
    chat = answering("hermes", THOUGHT)
    chat.request(tools=TOOLS)
    bodies = [delta_body(piece.message) for piece in chat.lm.stream_chat(ASKED, tools=TOOLS) if piece.message]
    assert "".join(body.get("content", "") for body in bodies) == "I look."
    assert "".join(body.get("reasoning", "") for body in bodies) == "Oslo?"
    assert all(body.get("reasoning") == body.get("reasoning_content") for body in bodies)
    first, *others = [body["tool_calls"] for body in bodies if "tool_calls" in body]
    assert [sorted(call) for call in first] == [["function", "id", "index", "type"]]
    assert first[0]["function"]["name"] == "weather"
    assert all(sorted(call) == ["function", "index"] for calls in others for call in calls)
    streamed_arguments = "".join(call["function"]["arguments"] for calls in (first, *others) for call in calls)
    assert streamed_arguments == OSLO
    assert delta_body(MessageDelta()) == {}


@given(st.integers(1, 7))
@settings(max_examples=7)
def test_chunks_add_up_to_the_answer(together: int) -> None:
    chat = answering("hermes", THOUGHT)
    chat.request(tools=TOOLS)
    body = BodyReader(chat.lm, "m", streams=True).read(
        "/v1/chat/completions", {"messages": ASKED, "tools": TOOLS, "stream": True}
    )
    pieces = list(chat.lm.stream(body.requests[0]))
    stream = body.protocol.events(body)
    runs = [pieces[at : at + together] for at in range(0, len(pieces), together)]
    chunks = [chunk for run in runs for _, chunk in stream.pieces(0, run)]
    chunks += stream.end(0, chat.lm.generate(body.requests[0]))
    choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Oslo?"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["function"].get("name") for call in calls if "id" in call] == ["weather"]
    assert "".join(call["function"]["arguments"] for call in calls) == OSLO
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_a_truncated_call_finishes_with_length() -> None:
    chat = answering("hermes", CALL)
    assert finish_reason(chat.chat(tools=TOOLS)) == "tool_calls"
    assert finish_reason(chat.chat(tools=TOOLS, max_new_tokens=50)) == "length"
    assert finish_reason(chat.chat(tools=TOOLS, tool_choice="none")) == "stop"


def test_a_conversation_continues_after_a_call() -> None:
    chat = answering("hermes", "It rains.")
    answer = AssistantMessage(None, "Oslo?", (ToolCall("call_1", "weather", OSLO),))
    messages = [*ASKED, answer.to_dict(), {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
    body = {
        "messages": json.loads(json.dumps(messages)),
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    (request,) = BodyReader(chat.lm, "m").read("/v1/chat/completions", body).requests
    assert request == chat.lm.chat_request(messages, tools=TOOLS)
