"""Tools together with a schema: the answer is calls, or JSON of the schema."""

import json
from typing import Any

import pytest
from answers import ASKED, CLOCK, TEMPLATES, WEATHER, Chat, MarkTokenizer, answering
from test_call_parameters import TEMPLATES as ONE_BY_ONE
from test_constrained_calls import admitted
from test_harmony import TEMPLATE as HARMONY
from test_harmony import TOKENIZERS

import onward
from onward.chat import AssistantMessage, ChatTemplate
from onward.constraints import JsonSchema
from onward.errors import RequestError
from onward.language_model import Request
from onward.protocols import BodyReader
from onward.testing import ByteTokenizer

TOOLS = [WEATHER, CLOCK]
OSLO = '{"city": "Oslo"}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
    "glm-4.7": "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}]',
    "mistral-args": f"[TOOL_CALLS]weather[ARGS]{OSLO}",
    "llama3": f'{{"name": "weather", "parameters": {OSLO}}}',
    "harmony": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OSLO}",
}
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "id": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    {"type": "object"},
    ANSWER,
    {"type": "object", "properties": {"name": {}, "id": {"const": 2**63 + 1}}, "required": ["name", "id"]},
]
SAID = f'{{"name": "Oslo", "id": {2**63 + 1}}}'


def chat_of(format: str, text: str = "", tokenizer: ByteTokenizer | None = None) -> Chat:
    template = TEMPLATES.get(format) or ONE_BY_ONE.get(format) or HARMONY
    chat = answering("plain", text, tokenizer or ByteTokenizer())
    lm = onward.LanguageModel(
        chat.lm.model, chat.lm.tokenizer, ChatTemplate(template, {"bos_token": "", "eos_token": ""}), chat.lm.defaults
    )
    assert lm.message_format.name == format
    return Chat(lm, chat.answers)


def content(format: str, text: str) -> str:
    return ("<|channel|>final<|message|>" if format == "harmony" else "") + text


def of(request: Request, text: str, tokenizer: ByteTokenizer | None = None) -> bool:
    """Whether a text may be the whole answer."""
    return admitted(request, tokenizer or ByteTokenizer(), text).endswith("$")


@pytest.mark.parametrize("format", CALLS)
def test_an_answer_is_a_call_or_follows_the_schema(format: str) -> None:
    chat, call = chat_of(format), CALLS[format]
    for schema in SCHEMAS:
        request = chat.request(tools=TOOLS, json_schema=schema)
        assert of(request, call)
        assert of(request, content(format, SAID))
        assert not of(request, content(format, "I look."))
        assert not of(request, content(format, '{"name": "Oslo", "id": "x"}')) or schema == {"type": "object"}
        wrong = call.replace("Oslo", 'Oslo", "x": "y') if "{" in call else call.replace("city", "x")
        # Without a mark, an invalid call is also a JSON object.
        assert not of(request, wrong) or (format, schema) == ("llama3", {"type": "object"})
        assert not of(request, f"I look. {call}"), "no text next to a call or an answer"
        required = chat.request(tools=TOOLS, json_schema=schema, tool_choice="weather")
        assert of(required, call)
        assert not of(required, content(format, SAID))
        none = chat.request(tools=TOOLS, json_schema=schema, tool_choice="none")
        assert of(none, content(format, SAID))
        assert not of(none, call) or (format, schema) == ("llama3", {"type": "object"})
        alone = chat.request(tools=TOOLS, json_schema=schema, parallel_tool_calls=False)
        assert of(alone, call)
        assert of(alone, content(format, SAID))
    request = chat.request(tools=TOOLS, json_schema=JsonSchema(ANSWER, whitespace=False))
    assert of(request, content(format, '{"name":"Oslo","id":5}'))
    assert not of(request, content(format, '{"name": "Oslo"}'))


@pytest.mark.parametrize("format", CALLS)
def test_the_message_is_a_call_or_content(format: str) -> None:
    for schema in SCHEMAS[1:]:
        for text in (CALLS[format], content(format, SAID)):
            chat = chat_of(format, text)
            whole = chat.chat(tools=TOOLS, json_schema=schema)
            assert whole.message is not None
            pieces = list(chat.lm.stream_chat(ASKED, tools=TOOLS, json_schema=schema))
            assert AssistantMessage.of(piece.message for piece in pieces if piece.message) == whole.message
            if text == CALLS[format]:
                assert (whole.message.content, whole.message.tool_calls[0].arguments) == (None, OSLO)
                with pytest.raises(RequestError, match="the answer has tool calls"):
                    _ = whole.parsed
            else:
                assert (whole.message.content, whole.message.tool_calls) == (SAID, ())
                assert whole.parsed == json.loads(SAID)


@pytest.mark.parametrize(
    ("format", "tokenizer"),
    [("harmony", TOKENIZERS[1]), ("mistral", MarkTokenizer()), ("mistral-args", MarkTokenizer())],
)
def test_marks_that_are_special_tokens(format: str, tokenizer: ByteTokenizer) -> None:
    request = chat_of(format, tokenizer=tokenizer).request(tools=TOOLS, json_schema=ANSWER)
    for text in (CALLS[format], content(format, SAID)):
        assert of(request, text, tokenizer)


def test_reasoning_may_precede_a_call_or_content() -> None:
    chat = chat_of("hermes")
    for options, before in (({}, "<think>\nHm.\n</think>\n\n"), ({"opens_thinking": True}, "Hm.\n</think>\n\n")):
        request = chat.request(tools=TOOLS, json_schema=ANSWER, **options)
        assert of(request, before + CALLS["hermes"])
        assert of(request, before + SAID)
        assert not of(request, before + "I look.")
    closed = chat.request(tools=TOOLS, json_schema=ANSWER, enable_thinking=False)
    assert not of(closed, f"<think>Hm.</think>{SAID}")
    assert of(closed, SAID)


def test_a_format_without_calls_only_has_the_schema() -> None:
    chat = answering("plain", "")
    template = ChatTemplate("{{ messages[0].content }}{{ tools }}", {})
    lm = onward.LanguageModel(chat.lm.model, chat.lm.tokenizer, template)
    request = lm.chat_request(ASKED, tools=TOOLS, json_schema=ANSWER)
    assert of(request, SAID)
    assert not of(request, CALLS["hermes"])


def test_http_bodies_give_the_same_constraint() -> None:
    """/v1/chat/completions and /v1/responses."""
    reader = BodyReader(chat_of("hermes").lm, "m", streams=True)
    named = {"name": "answer", "schema": ANSWER}
    for form, text, wrong in (
        ({"type": "json_object"}, "{}", "[]"),
        ({"type": "json_schema", "json_schema": named}, SAID, "{}"),
    ):
        body = {"messages": ASKED, "tools": TOOLS, "response_format": form}
        flat = form if "json_schema" not in form else {"type": "json_schema", **named}
        tools = [{"type": "function", **WEATHER["function"], "strict": False}]
        response = {"input": "Does it rain in Oslo?", "tools": tools, "text": {"format": flat}}
        for stream in (False, True):
            (chat,) = reader.read("/v1/chat/completions", body | {"stream": stream}).requests
            (answer,) = reader.read("/v1/responses", response | {"stream": stream}).requests
            for request in (chat, answer):
                assert of(request, CALLS["hermes"])
                assert of(request, text)
                assert not of(request, wrong)
