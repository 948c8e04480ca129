"""The state machine: the text of each family becomes reasoning, content and calls, however it is split."""

import json

import pytest
from answers import message, parsed
from hypothesis import given
from hypothesis import strategies as st

from onward.chat import FORMATS, AssistantMessage, ToolCall
from onward.errors import RequestError

OSLO = '{"city": "Oslo"}'


def calls(*arguments: str, names: tuple[str, ...] = ()) -> tuple[ToolCall, ...]:
    each = zip(arguments, names or ("weather",) * len(arguments), strict=True)
    return tuple(ToolCall(f"call {at}", name, text) for at, (text, name) in enumerate(each))


def hermes(*arguments: str) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "weather", "arguments": {each}}}\n</tool_call>' for each in arguments)


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("hermes", "Hello!\n", AssistantMessage("Hello!\n")),
        ("hermes", "", AssistantMessage("")),
        ("hermes", hermes(OSLO), AssistantMessage(None, None, calls(OSLO))),
        ("hermes", hermes(OSLO, "{}"), AssistantMessage(None, None, calls(OSLO, "{}"))),
        (
            "hermes",
            f"<think>\nHm.\n\n  Oslo?\n</think>\n\nI look.\n{hermes(OSLO)}\n",
            AssistantMessage("I look.", "Hm.\n\n  Oslo?", calls(OSLO)),
        ),
        ("hermes", f"One.\n{hermes(OSLO)}\nTwo.\n", AssistantMessage("One.\nTwo.\n", None, calls(OSLO))),
        ("hermes", "\n<think>\n\n</think>\n\nHello!", AssistantMessage("Hello!")),
        ("hermes", "<think>Hm", AssistantMessage(None, "Hm")),
        ("hermes", "Say <think> to think.", AssistantMessage("Say <think> to think.")),
        ("hermes", f"<think>{hermes(OSLO)}</think>No.", AssistantMessage("No.", hermes(OSLO))),
        (
            "llama3",
            '{"name": "weather", "parameters": {"city": "Oslo"}}',
            AssistantMessage(None, None, calls(OSLO)),
        ),
        (
            "llama3",
            '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}',
            AssistantMessage(None, None, calls(OSLO)),
        ),
        (
            "llama3",
            '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "clock", "parameters": {}}',
            AssistantMessage(None, None, calls(OSLO, "{}", names=("weather", "clock"))),
        ),
        ("llama3", ' {"name": "Bob", "age": 5}', AssistantMessage(' {"name": "Bob", "age": 5}')),
        ("llama3", "<|python_tag|>print(1)", AssistantMessage("<|python_tag|>print(1)")),
        ("llama3", 'It is {"name": "weather"}.', AssistantMessage('It is {"name": "weather"}.')),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]',
            AssistantMessage(None, None, calls(OSLO, "{}", names=("weather", "clock"))),
        ),
        (
            "mistral",
            '[THINK]Hm.[/THINK]I look.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
            AssistantMessage("I look.", "Hm.", calls(OSLO)),
        ),
        (
            "mistral-args",
            '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]clock[ARGS]{}',
            AssistantMessage(None, None, calls(OSLO, "{}", names=("weather", "clock"))),
        ),
        ("mistral-args", '[TOOL_CALLS]weather{"city": "Oslo"}', AssistantMessage(None, None, calls(OSLO))),
        (
            "mistral-args",
            '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}',
            AssistantMessage(None, None, (ToolCall("abcdefghi", "weather", OSLO),)),
        ),
        ("plain", f"<think>Hm.</think>{hermes(OSLO)}", AssistantMessage(hermes(OSLO), "Hm.")),
    ],
)
def test_texts_and_their_messages_by_family(format: str, text: str, expected: AssistantMessage) -> None:
    assert message(format, text) == expected
    assert parsed(format, list(text))[1] == expected


@pytest.mark.parametrize(
    "arguments",
    [
        '{"text": "a \\"quoted\\" } </tool_call> [TOOL_CALLS] \\\\"}',
        '{ "a" : [1, {"b": [[]]}, "]"] , "c":1e-5,"d" : null }',
        '{"größe": "東京 🦊 \\ud83e\\udd8a", "line": "one\ntwo"}',
        '{"a": True, "b": None}',
        "[]",
        '"text"',
        "null",
        "{}",
    ],
)
@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'),
        ("hermes", '<tool_call>{"arguments": %s, "name": "weather"}</tool_call>'),
        ("llama3", '{"name": "weather", "parameters": %s}'),
        ("llama3", '{"parameters": %s, "id": [{"x": 1}], "name": "weather"}'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": %s, "id": "abcdefghi"}]'),
        ("mistral-args", "[TOOL_CALLS]weather[ARGS]%s"),
    ],
)
def test_arguments_are_passed_through_unchanged(format: str, text: str, arguments: str) -> None:
    """Arguments are never parsed and serialized again, so nothing in them is lost or changed."""
    for parts in ([text % arguments], list(text % arguments)):
        assert parsed(format, parts)[1] == AssistantMessage(None, None, calls(arguments))


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        # An incomplete call is content until its name is known.
        ("hermes", "<tool_call>", AssistantMessage("<tool_call>")),
        ("hermes", '<tool_call>\n{"name": "wea', AssistantMessage('<tool_call>\n{"name": "wea')),
        ("hermes", "a <tool", AssistantMessage("a <tool")),
        ("hermes", "<tool_call>\nnone\n</tool_call>", AssistantMessage("<tool_call>\nnone\n</tool_call>")),
        ("hermes", '<tool_call>\n{"arguments": {}}', AssistantMessage('<tool_call>\n{"arguments": {}}')),
        ("hermes", '<tool_call>{"name": ""}', AssistantMessage('<tool_call>{"name": ""}')),
        ("hermes", '<tool_call>{"name": 5}', AssistantMessage('<tool_call>{"name": 5}')),
        (
            "hermes",
            f"<tool_call>\n\n{hermes(OSLO)}",
            AssistantMessage("<tool_call>", None, calls(OSLO)),
        ),
        ("mistral", "[TOOL_CALLS]", AssistantMessage("[TOOL_CALLS]")),
        ("mistral", "[TOOL_CALLS] [1]", AssistantMessage("[TOOL_CALLS] [1]")),
        ("mistral-args", "[TOOL_CALLS]weather", AssistantMessage("[TOOL_CALLS]weather")),
        ("llama3", ' {"name": "weather"', AssistantMessage(None, None, calls(""))),
        # From there on it stays a call, and what does not belong to it is content.
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"a": [1',
            AssistantMessage(None, None, calls('{"a": [1')),
        ),
        ("hermes", '<tool_call>{"name": "weather"}</tool_call>', AssistantMessage(None, None, calls("{}"))),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {}', AssistantMessage(None, None, calls("{}"))),
        (
            "hermes",
            '<tool_call>\n{"name": "weather", "arguments": {"a": 1}\n</tool_call>\nSo.',
            AssistantMessage("So.", None, calls('{"a": 1}')),
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"a": [1}</tool_call>',
            AssistantMessage("}</tool_call>", None, calls('{"a": [1')),
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {}} so </tool_call>',
            AssistantMessage("so </tool_call>", None, calls("{}")),
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "weather", "arguments": {}}, {"nam',
            AssistantMessage('{"nam', None, calls("{}")),
        ),
    ],
)
def test_truncated_call(format: str, text: str, expected: AssistantMessage) -> None:
    assert message(format, text) == expected
    assert parsed(format, list(text))[1] == expected


def test_the_prompt_may_open_the_reasoning() -> None:
    for text in ("\nHm.\n</think>\n\nYes.", "<think>\nHm.\n</think>\n\nYes."):
        assert message("hermes", text, thinking=True) == AssistantMessage("Yes.", "Hm.")
    assert message("hermes", "Hm.", thinking=True) == AssistantMessage(None, "Hm.")


def test_nothing_is_a_call_without_tools() -> None:
    for format, text in (("hermes", hermes(OSLO)), ("llama3", '{"name": "weather", "parameters": {}}')):
        assert message(format, text, tools=None) == AssistantMessage(text)


# Pieces of everything that the formats know, and of what almost is.
_PARTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
        ),
        *('{"name": "weather", "arguments": {"city": "Oslo"}}', '{"name": "clock", "parameters": {}}', "weather", '"'),
        *(
            '{"name": "',
            '"arguments": ',
            '{"a": [1, "\\"}',
            "{",
            "}",
            "[",
            "]",
            ",",
            ";",
            ":",
            "\\",
            " ",
            "\n",
            "a",
            "é",
        ),
        *("[THINK]", "[/THINK]", "<", "<tool", "[TOOL", "</"),
    ]
)
_TEXTS = st.lists(_PARTS, max_size=12).map("".join)


@st.composite
def _cut(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(_TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    ends = [*cuts, len(text)]
    return text, [text[start:end] for start, end in zip([0, *cuts], ends, strict=True)]


@given(_cut(), st.sampled_from(list(FORMATS)), st.booleans(), st.sampled_from([None, (), ("weather",)]))
def test_message_does_not_depend_on_the_chunks(
    cut: tuple[str, list[str]], format: str, thinking: bool, tools: tuple[str, ...] | None
) -> None:
    text, parts = cut
    whole = message(format, text, thinking=thinking, tools=tools)
    assert parsed(format, parts, thinking=thinking, tools=tools)[1] == whole
    assert parsed(format, list(text), thinking=thinking, tools=tools)[1] == whole


@given(_TEXTS, st.sampled_from(list(FORMATS)), st.booleans())
def test_no_text_is_lost(text: str, format: str, thinking: bool) -> None:
    """Where no call is read, the message has all of the text but for the marks of reasoning and spaces beside them."""
    read = message(format, text, thinking=thinking)
    if not read.tool_calls:
        opening, closing = FORMATS[format].thinking
        kept = "".join(f"{read.reasoning or ''}{read.content or ''}".split())
        written = "".join(text.split())
        without = written.replace(opening, "", 1)
        assert kept in (written, without, written.replace(closing, "", 1), without.replace(closing, "", 1))
    for call in read.tool_calls:
        assert call.name in text
        assert call.arguments in (*[text[at:][: len(call.arguments)] for at in range(len(text))], "{}")


@given(_TEXTS)
def test_text_without_marks_is_the_content(text: str) -> None:
    if not text.lstrip().startswith("<think>"):
        assert message("plain", text) == AssistantMessage(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.dictionaries(st.text(max_size=8), _JSON, max_size=3), min_size=1, max_size=3),
    st.sampled_from(["hermes", "llama3", "mistral", "mistral-args"]),
    st.booleans(),
)
def test_rendered_calls_parse_to_the_same_calls(
    arguments: list[dict[str, object]], format: str, ascii_only: bool
) -> None:
    written = [json.dumps(each, ensure_ascii=ascii_only) for each in arguments]
    objects = [
        f'{{"name": "weather", "{"parameters" if format == "llama3" else "arguments"}": {each}}}' for each in written
    ]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects),
        "llama3": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
        "mistral-args": "".join(f"[TOOL_CALLS]weather[ARGS]{each}" for each in written),
    }[format]
    deltas, read = parsed(format, list(text))
    assert read == AssistantMessage(None, None, calls(*written))
    assert [call.parsed for call in read.tool_calls] == arguments
    for at, each in enumerate(written):
        fragments = [call.arguments for delta in deltas for call in delta.tool_calls if call.index == at]
        assert len(fragments) >= len(each) - 1 or "\\" in each, "arguments come as they are written"


def test_only_possible_marks_are_delayed() -> None:
    deltas, _ = parsed("hermes", ["Hi", " <", "b> ", "<tool_", "call", "x", " "])
    assert [delta.content for delta in deltas] == ["Hi", "", " <b>", "", "", " <tool_callx", "", " "]
    deltas, _ = parsed(
        "hermes", ["<tool_call>", '{"name": ', '"weather"', ', "arguments": {"a', '": 1', "}}", "</tool_call>"]
    )
    assert [tuple((call.id, call.name, call.arguments) for call in delta.tool_calls) for delta in deltas] == [
        *((), (), (("call 0", "weather", ""),)),
        *(((None, None, '{"a'),), ((None, None, '": 1'),), ((None, None, "}"),)),
        *((), ()),
    ]


def test_parsed_arguments() -> None:
    assert ToolCall("1", "f", '{"a": "one\ntwo"}').parsed == {"a": "one\ntwo"}
    assert ToolCall("1", "f", '"{\\"a\\": 1}"').parsed == {"a": 1}
    for arguments in ("", "[1]", '{"a": [1', "null"):
        with pytest.raises(RequestError, match=r"the arguments of 'f' are not (a )?JSON"):
            _ = ToolCall("1", "f", arguments).parsed
