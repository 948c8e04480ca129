"""Custom tools, whose calls have a text, and choices of allowed tools."""

import json
import re
from typing import Any

import pytest
import torch
from answers import ASKED, CLOCK, WEATHER, MarkTokenizer, parsed
from hypothesis import given, settings
from hypothesis import strategies as st

import onward
from onward.chat import AssistantMessage, ChatTemplate, MessageParser, ToolCall, read_tool_use
from onward.chat.custom_input import InputReader
from onward.chat.formats import FORMATS
from onward.chat.quoted_lark import quoted_lark, quoted_regex
from onward.constraints import Lark, Regex
from onward.errors import RequestError
from onward.sampling.constraint import admits
from onward.testing import ByteTokenizer, scripted_model

TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
TOKENIZER = ByteTokenizer()
WITH_CALLS = [name for name, format in FORMATS.items() if format.syntax is not None]
PATCH = """start: "*** Begin\\n" hunk+ "*** End"
hunk: ("+" | "-" | "\\"") TEXT LF  // a line
TEXT: /[^\\n]{0,4}/
%import common.LF
"""


def custom(name: str = "patch", syntax: str | None = None, definition: str = "") -> dict[str, Any]:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": name, **({"format": grammar} if syntax else {})}}


def matches(grammar: Any, text: str) -> bool:
    """Whether the whole text is one of a grammar's."""
    constraint = grammar(TOKENIZER, frozenset({TOKENIZER.eos_id}))
    for token in TOKENIZER.encode(text):
        if constraint.is_done or not admits(constraint.mask(), token):
            return False
        constraint.accept(token)
    return bool(constraint.is_done or admits(constraint.mask(), TOKENIZER.eos_id or 0))


def random_lm(format: str, seed: int = 0) -> onward.LanguageModel:
    """A model that would write anything: its logits are noise, which depends on the text so far."""
    tokenizer = MarkTokenizer() if seed % 2 else TOKENIZER

    def script(history: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *history)) % 2**31)
        return 3 * torch.randn(tokenizer.vocab_size, generator=generator)

    model = scripted_model(script, vocab_size=tokenizer.vocab_size)
    options = onward.GenerateOptions(max_new_tokens=900, eos=tokenizer.eos_id)
    return onward.LanguageModel(model, tokenizer, ChatTemplate(TEMPLATE, {}), options, message_format=format)


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


CUTS = st.lists(st.integers(0, 60), max_size=6)


@given(text=st.text(max_size=12), ascii=st.booleans(), cuts=CUTS)
def test_the_input_does_not_depend_on_format_or_chunks(text: str, ascii: bool, cuts: list[int]) -> None:
    read: list[str] = []
    reader = InputReader(read.append)
    written = json.dumps({"input": text}, ensure_ascii=ascii)
    for part in split(written, cuts):
        reader.feed(part)
    reader.finish()
    assert "".join(read) == text


@given(written=st.text('{}" :inpu\\tu0dD8', max_size=16) | st.just('{"input": "a\\uD83Dx\\'), cuts=CUTS)
def test_arguments_of_another_shape_are_the_input_for_any_chunks(written: str, cuts: list[int]) -> None:
    results = []
    for parts in ([written], split(written, cuts)):
        read: list[str] = []
        reader = InputReader(read.append)
        for part in parts:
            reader.feed(part)
        reader.finish()
        results.append("".join(read))
    assert results[0] == results[1]
    assert '"input"' in written or results[0] == written


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"b\\""}}\n</tool_call>'),
        ("llama3", '{"name": "patch", "parameters": {"input": "a\\n\\"b\\""}}'),
        ("mistral", '[TOOL_CALLS][{"name": "patch", "arguments": {"input": "a\\n\\"b\\""}}]'),
        ("mistral-args", '[TOOL_CALLS]patch[ARGS]{"input": "a\\n\\"b\\""}'),
        ("harmony", '<|channel|>commentary to=functions.patch<|message|>{"input": "a\\n\\"b\\""}<|call|>'),
        ("glm", '<tool_call>patch\n<arg_key>input</arg_key>\n<arg_value>a\n"b"</arg_value>\n</tool_call>'),
        ("qwen3-coder", '<tool_call>\n<function=patch>\n<parameter=input>\na\n"b"\n</parameter>\n</function>'),
    ],
)  # fmt: skip
def test_an_input_makes_the_round_trip_in_every_format(format: str, text: str) -> None:
    schema = {"type": "object", "properties": {"input": {"type": "string"}}}
    for parts in ([text], list(text)):
        parser = MessageParser(FORMATS[format], "call {}".format, {"patch": schema}, custom=["patch"])
        deltas = []
        for part in parts:
            parser.feed(part)
            deltas.append(parser.take())
        parser.finish()
        message = AssistantMessage.of([*deltas, parser.take()])
        (call,) = message.tool_calls
        assert call == ToolCall("call 0", "patch", 'a\n"b"', "custom")
        assert call.parsed == {"input": call.arguments}
        assert message == AssistantMessage.of([message.as_delta()])
    (rendered,) = message.to_dict()["tool_calls"]
    assert rendered == {"id": "call 0", "type": "custom", "custom": {"name": "patch", "input": 'a\n"b"'}}
    lm = random_lm("hermes")
    again = [*ASKED, message, {"role": "tool", "tool_call_id": "call 0", "content": "ok"}]
    assert "'arguments': {'input':" in lm.decode(lm.chat_prompt(again, {"tools": [WEATHER]})), "as of a function"
    assert parsed(format, [text], ["patch"])[1].tool_calls[0].type == "function", "of a function of that name"


REGEXES = [
    'a"b', r"[^\n]*x", r"(?i:a\")b?", r"\s{1,2}|\\[a-c]", r"(?s:.)\/", r"[\n\t]+z", r"\d\D\w\W",
    "é[à-ü]*", r"a{2,}(b|c)*?",
]  # fmt: skip


@settings(max_examples=200)
@given(pattern=st.sampled_from(REGEXES), text=st.text('ab"\\\n\t/xzéàABc1 \x01', max_size=5))
def test_a_quoted_pattern_matches_the_quoted_texts(pattern: str, text: str) -> None:
    quoted = json.dumps(text, ensure_ascii=False)[1:-1]
    assert matches(Lark(f"start: {quoted_regex(pattern)}"), quoted) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('*** Begin\n+ab\n*** End', True),
        ('*** Begin\n+"\\"\n""\n*** End', True),
        ("*** Begin\n*** End", False),
        ("*** Begin\n+abcde\n*** End", False),
        ("*** Begin\nab\n*** End", False),
    ],
)  # fmt: skip
def test_a_quoted_grammar_derives_the_quoted_texts(text: str, fits: bool) -> None:
    assert matches(Lark(PATCH), text) == fits
    assert matches(Lark(quoted_lark(PATCH)), json.dumps(text)[1:-1]) == fits


COMMON = [
    *("CNAME", "CR", "C_COMMENT", "CPP_COMMENT", "DECIMAL", "DIGIT", "ESCAPED_STRING", "FLOAT", "HEXDIGIT", "INT"),
    *("LCASE_LETTER", "LETTER", "LF", "NEWLINE", "NUMBER", "SH_COMMENT", "SIGNED_FLOAT", "SIGNED_INT", "SIGNED_NUMBER"),
    *("SQL_COMMENT", "UCASE_LETTER", "WORD", "WS", "WS_INLINE"),
]


@settings(max_examples=300)
@given(name=st.sampled_from(COMMON), text=st.text('a1F_.+-eE \n\r\t"\\/*#é', max_size=6))
def test_imported_terminals_equal_those_of_lark(name: str, text: str) -> None:
    grammar = f"start: {name}\n%import common.{name}"
    assert matches(Lark(quoted_lark(grammar)), json.dumps(text, ensure_ascii=False)[1:-1]) == matches(
        Lark(grammar), text
    )


GRAMMARS = [
    ("lark", PATCH),
    ("regex", "[a<>/]{1,9}[^x]{0,9}"),
    ("regex", 'say "[a-c\\n]{2,5}"/'),
    ("lark", 'start: /[^x]{3}/ | "yes"i'),
]


@pytest.mark.parametrize(("syntax", "definition"), GRAMMARS, ids=["lark", "tags", "regex", "short"])
@pytest.mark.parametrize("seed", [0, 1], ids=["text", "special tokens"])
@pytest.mark.parametrize("format", WITH_CALLS)
def test_a_constrained_input_always_matches(format: str, seed: int, syntax: str, definition: str) -> None:
    lm = random_lm(format, seed)
    grammar = Regex(definition) if syntax == "regex" else Lark(definition)
    options = {"tools": [WEATHER, custom("patch", syntax, definition)], "tool_choice": "patch", "seed": 3 + seed}
    whole = lm.chat(ASKED, temperature=0.5, **options)
    assert whole.finish_reason == "stop"
    assert whole.message is not None
    (call,) = whole.message.tool_calls
    assert (call.name, call.type) == ("patch", "custom")
    assert matches(grammar, call.arguments), call
    deltas = [piece.message for piece in lm.stream_chat(ASKED, temperature=0.5, **options)]
    assert AssistantMessage.of([delta for delta in deltas if delta]) == whole.message


def test_a_required_free_form_input_is_a_string() -> None:
    lm = random_lm("hermes")
    bias = {token: -20.0 for token in range(256) if not chr(token).isalnum()} | {ord('"'): 10.0}
    options = {"tools": [custom()], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}, "seed": 1}
    answer = lm.chat(ASKED, temperature=1.0, logit_bias=bias, **options).message
    assert answer is not None
    assert [(call.name, call.type) for call in answer.tool_calls] == [("patch", "custom")]


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CLOCK]}}


def allowed(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def named(name: str, type: str = "function") -> dict[str, Any]:
    return {"type": type, type: {"name": name}}


def test_only_allowed_tools_are_called() -> None:
    tools = [WEATHER, CLOCK, custom()]
    use = read_tool_use(tools, allowed("auto", named("clock"), named("patch", "custom")))
    assert (use.choice, [tool.name for tool in use.callable_tools]) == ("auto", ["clock", "patch"])
    assert use.is_constrained
    assert len(use.tools) == 3, "the prompt has all of them"
    everything = read_tool_use(tools, allowed("auto", *(named(tool.name) for tool in use.tools)))
    assert not everything.is_constrained
    lm = random_lm("hermes")
    for seed in range(3):
        choice = allowed("required", named("clock"))
        message = lm.chat(ASKED, tools=tools[:2], tool_choice=choice, parallel_tool_calls=False, seed=seed).message
        assert message is not None
        assert [call.name for call in message.tool_calls] == ["clock"]
    request = lm.chat_request(ASKED, tools=tools[:2], tool_choice=allowed("auto", named("clock")))
    constraint = request.options.new_constraint(TOKENIZER)
    assert constraint is not None
    taken = []
    for token in TOKENIZER.encode('Hm.<tool_call>\n{"name": "weather"'):
        if not admits(constraint.mask(), token):
            break
        constraint.accept(token)
        taken.append(token)
    assert TOKENIZER.decode(taken) == 'Hm.<tool_call>\n{"name": "'


def grammar(syntax: Any, definition: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "p", "format": {"type": "grammar", "grammar": {
        "syntax": syntax, "definition": definition}}}}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "at", "message"),
    [
        ({"tools": [{"type": "custom", "custom": 5}]}, "tools[0].custom", "must be an object with a name; got 5"),
        ({"tools": [{"type": "custom", "name": "p"}]}, "tools[0]", "must be {'type': 'custom', 'custom': {'name': …}}"),
        ({"tools": [{"type": "custom", "custom": {"name": "p q"}}]}, "tools[0].custom.name", "1 to 64 letters"),
        ({"tools": [{"type": "custom", "custom": {"name": "p", "x": 1}}]}, "tools[0].custom", "an unknown key 'x'"),
        ({"tools": [{"type": "custom", "custom": {"name": "p", "format": 5}}]}, "tools[0].custom.format", "got 5"),
        ({"tools": [grammar("gbnf", "x")]}, "tools[0].custom.format.grammar.syntax", "must be 'lark' or 'regex'"),
        ({"tools": [grammar("lark", "")]}, "tools[0].custom.format.grammar.definition", "a non-empty text; got ''"),
        ({"tools": [grammar("lark", "start: nothing")]}, "tools", 'definition cannot be compiled: at'),
        ({"tools": [grammar("regex", "[")]}, "tools", "tools[0].custom.format.grammar.definition cannot be compiled"),
        ({"tools": [grammar("lark", "start: %json {}")]}, "tools[0].custom.format.grammar.definition", "'%json'"),
        ({"tools": [grammar("lark", "start: /a$/")]}, "tools[0].custom.format.grammar.definition", "has at, which"),
        ({"tool_choice": allowed("auto", named("nothing"))}, "tool_choice", "names 'nothing', but the tools are"),
        ({"tool_choice": allowed("any", named("clock"))}, "tool_choice", "'mode': 'auto' or 'required'"),
        ({"tool_choice": allowed("auto")}, "tool_choice", "must have allowed_tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", "must have allowed_tools"),
        ({"tool_choice": allowed("auto", {"type": "mcp"})}, "tool_choice", "the name of a tool"),
        ({"tools": [], "tool_choice": ALLOWED}, "tool_choice", "there are no tools"),
    ],
)  # fmt: skip
def test_invalid_tools_and_choices_are_refused(options: dict[str, Any], at: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as refused:
        random_lm("hermes").chat_request(ASKED, **{"tools": [WEATHER, CLOCK], **options})
    assert refused.value.option == at
