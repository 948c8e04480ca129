"""Required calls are always made, and they parse, whatever the model prefers."""

import json
from typing import Any

import pytest
import torch
from answers import ASKED, CLOCK, TEMPLATES, WEATHER, MarkTokenizer, answering
from hypothesis import given, settings
from hypothesis import strategies as st

import onward
from onward.chat import AssistantMessage, ChatTemplate
from onward.constraints import JsonSchema, Regex
from onward.errors import RequestError
from onward.language_model import Request
from onward.protocols import BodyError, BodyReader
from onward.sampling.constraint import admits
from onward.testing import ByteTokenizer, scripted_model

TOOLS = [WEATHER, CLOCK]
FORMATS = ["hermes", "llama3", "mistral", "mistral-args"]
TOKENIZERS = [ByteTokenizer(), MarkTokenizer()]
BOUNDED: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "nights": {"type": "integer", "minimum": 1, "maximum": 30},
                "beds": {"type": "array", "items": {"enum": ["one", "two"]}, "maxItems": 2},
            },
            "required": ["city", "nights"],
        },
    },
}


def random_lm(format: str, tokenizer: ByteTokenizer, seed: int = 0) -> onward.LanguageModel:
    """A model that would write anything: its logits are noise, which depends on the text so far."""

    def script(history: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *history)) % 2**31)
        return 3 * torch.randn(tokenizer.vocab_size, generator=generator)

    template = ChatTemplate(TEMPLATES[format], {"bos_token": "<s>", "eos_token": "</s>"})
    options = onward.GenerateOptions(max_new_tokens=600, eos=tokenizer.eos_id)
    return onward.LanguageModel(scripted_model(script, vocab_size=tokenizer.vocab_size), tokenizer, template, options)


def no_reasoning(tokenizer: ByteTokenizer) -> dict[int, float]:
    """A bias against the marks of reasoning, which noise would never close."""
    return dict.fromkeys([*b"<hH", *([261] if isinstance(tokenizer, MarkTokenizer) else [])], -50.0)


def message_of(completion: onward.Completion) -> AssistantMessage:
    assert completion.finish_reason == "stop", completion.text
    assert completion.message is not None
    return completion.message


def admitted(request: Request, tokenizer: ByteTokenizer, text: str) -> str:
    """The part of a text that the constraint admits, with a "$" if the text may end there."""
    constraint = request.options.new_constraint(tokenizer)
    assert constraint is not None
    taken: list[int] = []
    for token in tokenizer.encode(text):
        if constraint.is_done or not admits(constraint.mask(), token):
            return tokenizer.decode(taken)
        constraint.accept(token)
        taken.append(token)
    may_end = constraint.is_done or admits(constraint.mask(), tokenizer.eos_id or 0)
    return text + ("$" if may_end else "")


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["text", "special tokens"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_required_call_always_parses(format: str, tokenizer: ByteTokenizer) -> None:
    for seed in range(3):
        lm = random_lm(format, tokenizer, seed)
        for choice, names in (("required", {"book", "clock"}), ("book", {"book"}), ("clock", {"clock"})):
            message = message_of(
                lm.chat(ASKED, tools=[BOUNDED, CLOCK], tool_choice=choice, logit_bias=no_reasoning(tokenizer))
            )
            assert message.content is None
            assert message.tool_calls
            for call in message.tool_calls:
                assert call.name in names
                assert set(call.parsed) <= ({"city", "nights", "beds"} if call.name == "book" else set())
                assert call.arguments == json.dumps(call.parsed, ensure_ascii=False), "spaces as in training"
            assert len(message.tool_calls) == 1 or choice == "required"


@given(st.integers(0, 1000), st.sampled_from(FORMATS), st.sampled_from(TOKENIZERS), st.booleans())
@settings(max_examples=25)
def test_strict_tools_are_called_correctly_or_not_at_all(
    seed: int, format: str, tokenizer: ByteTokenizer, parallel: bool
) -> None:
    strict = {"type": "function", "function": {**BOUNDED["function"], "strict": True}}
    lm = random_lm(format, tokenizer, seed)
    options: dict[str, Any] = {"tools": [strict], "parallel_tool_calls": parallel, "max_new_tokens": 120}
    completion = lm.chat(ASKED, **options, logit_bias={tokenizer.eos_id or 0: -4.0})
    assert completion.message is not None
    for call in completion.message.tool_calls[: None if completion.finish_reason == "stop" else -1]:
        assert call.parsed["nights"] in range(1, 31)
    assert len(completion.message.tool_calls) <= (99 if parallel else 1)
    pieces = list(lm.stream_chat(ASKED, **options, logit_bias={tokenizer.eos_id or 0: -4.0}))
    assert "".join(piece.text for piece in pieces) == completion.text


CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        "",
    ),
    "llama3": ('{"name": "weather", "parameters": {"city": "Oslo"}}', '; {"name": "clock", "parameters": {}}', ""),
    "mistral": (
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}',
        ', {"name": "clock", "arguments": {}}',
        "]",
    ),
    "mistral-args": ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', "[TOOL_CALLS]clock[ARGS]{}", ""),
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["text", "special tokens"])
@pytest.mark.parametrize("format", FORMATS)
def test_admitted_texts(format: str, tokenizer: ByteTokenizer) -> None:
    chat = answering(format, "", tokenizer)
    first, second, end = CALLS[format]
    opening, closing = chat.lm.message_format.thinking

    def of(text: str, **options: Any) -> str:
        return admitted(chat.request(tools=TOOLS, **options), tokenizer, text)

    one, two = first + end, first + second + end
    reasoned = f"{opening}\nOslo? {{ {chat.lm.message_format.openers[0]} no\n{closing}\n\n"
    if isinstance(tokenizer, MarkTokenizer):  # in reasoning a special token says nothing
        reasoned = reasoned.replace(chat.lm.message_format.openers[0], "")
    # A template that does not know reasoning is of a model that does not write it.
    assert chat.lm.chat_template is not None
    reasons = any(opening in source for source in chat.lm.chat_template.sources)
    assert reasons == (format in ("hermes", "mistral-args"))
    for text in (one, two, *([reasoned + one] if reasons else [])):
        assert of(text, tool_choice="required") == text + "$"
    assert of(reasoned + one, tool_choice="required").endswith("$") == reasons
    assert of("I look.", tool_choice="required") == ""
    assert of(one.replace("city", "town"), tool_choice="required").endswith('{"')
    assert not of(two, tool_choice="weather").endswith("$"), "a named tool is called once"
    assert of(one, tool_choice="weather") == one + "$"
    assert not of(two, tool_choice="required", parallel_tool_calls=False).endswith("$")
    # Where no call has to come there may be text, and text before calls.
    with_reasons = (reasoned, f"{reasoned}I look.", reasoned + one) if reasons else ()
    for text in ("", "I look.", "a < b [1] {", one, *with_reasons):
        assert of(text, parallel_tool_calls=False) == text + "$"
    assert not of(two, parallel_tool_calls=False).endswith("$")
    text = f"I look.\n{'<|python_tag|>' if format == 'llama3' else ''}{one}"
    assert of(text, parallel_tool_calls=False) == text + "$"
    assert not of(text.replace("city", "town"), parallel_tool_calls=False).endswith("$")
    assert "I look." in of(f"I look.{chat.lm.message_format.openers[0]}nothing", parallel_tool_calls=False)


def test_reasoning_opened_by_the_prompt_may_end() -> None:
    chat = answering("hermes", "")
    request = chat.request(tools=TOOLS, tool_choice="required", opens_thinking=True)
    text = f"Hm.\n</think>\n\n{CALLS['hermes'][0]}"
    assert admitted(request, ByteTokenizer(), text) == text + "$"
    assert not admitted(request, ByteTokenizer(), CALLS["hermes"][0]).endswith("$"), "it is reasoning still"


def test_reasoning_closed_by_the_prompt_stays_closed() -> None:
    chat = answering("hermes", "")
    request = chat.request(tools=TOOLS, tool_choice="required", enable_thinking=False)
    assert admitted(request, ByteTokenizer(), f"<think>Hm.</think>{CALLS['hermes'][0]}") == "<t"
    assert admitted(request, ByteTokenizer(), CALLS["hermes"][0]) == CALLS["hermes"][0] + "$"


def test_constrained_calls_are_equal_in_streams_engines_and_with_drafts() -> None:
    lm = random_lm("hermes", ByteTokenizer())
    options: dict[str, Any] = {"tools": [BOUNDED, CLOCK], "tool_choice": "required", "temperature": 1.0, "seed": 4}
    options["logit_bias"] = no_reasoning(ByteTokenizer())
    whole = lm.chat(ASKED, **options)
    assert message_of(whole).tool_calls
    pieces = list(lm.stream_chat(ASKED, **options))
    assert AssistantMessage.of(piece.message for piece in pieces if piece.message) == whole.message
    assert lm.chat(ASKED, draft="lookup", **options).message == whole.message
    with onward.Engine(lm) as engine:
        assert engine.submit(messages=ASKED, **options).result().message == whole.message
    body = {"messages": ASKED, "tools": [BOUNDED, CLOCK], "tool_choice": "required", "seed": 4, "temperature": 1.0}
    bias = {str(token): value for token, value in options["logit_bias"].items()}
    (request,) = BodyReader(lm, "m").read("/v1/chat/completions", body | {"logit_bias": bias}).requests
    assert request == lm.chat_request(ASKED, **options)
    assert lm.generate(request).message == whole.message


def test_unsupported_constraints_are_refused() -> None:
    chat = answering("hermes", "")
    with pytest.raises(RequestError, match="regex and the requested tool calls are mutually exclusive"):
        chat.chat(tools=TOOLS, tool_choice="required", regex="a")
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": unique}}]
    chat.chat(tools=tools)
    with pytest.raises(RequestError, match=r"^tools\[0\]\.function\.parameters cannot be compiled: .*uniqueItems"):
        chat.chat(tools=tools, tool_choice="required")
    with pytest.raises(BodyError) as refused:
        BodyReader(chat.lm, "m").read(
            "/v1/chat/completions", {"messages": ASKED, "tools": tools, "tool_choice": "required"}
        )
    assert refused.value.param == "tools"
    template = ChatTemplate("{{ messages[0].content }}{{ tools }}", {})
    plain = onward.LanguageModel(chat.lm.model, chat.lm.tokenizer, template)
    with pytest.raises(RequestError, match=r"tool_choice, .* need to know how the model writes calls.* message_format"):
        plain.chat(ASKED, tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {"type": "object"}}, '{"a": 1}'),
        ({"constraint": JsonSchema({"type": "object"}, whitespace=False)}, '{"a":1}'),
        ({"regex": "(a/b)+"}, "a/ba/b"),
        ({"choice": ["yes", "no"]}, "no"),
        ({"grammar": 'start: "a" b\nb: "b"'}, "ab"),
    ],
    ids=str,
)
def test_a_constraint_applies_after_reasoning_opened_by_the_prompt(options: dict[str, Any], message: str) -> None:
    text = f"Hm {{ </thin.\n</think>\n\n{message}"
    chat = answering("hermes", text)
    completion = chat.chat(opens_thinking=True, **options)
    assert completion.message == AssistantMessage(message, "Hm { </thin.")
    if "{" in message:
        assert completion.parsed == {"a": 1}
    assert (
        admitted(chat.request(opens_thinking=True, **options), ByteTokenizer(), f"x</think>@{message}") == "x</think>"
    )
    # Without it the constraint applies from the first token.
    assert admitted(chat.request(**options), ByteTokenizer(), message) == f"{message}$"


def test_a_custom_constraint_applies_from_the_first_token() -> None:
    chat = answering("hermes", "ab")
    rule = Regex("ab")(ByteTokenizer(), frozenset({257}))
    assert chat.chat(opens_thinking=True, constraint=rule).message == AssistantMessage("ab")
