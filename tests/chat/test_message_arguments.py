"""The arguments of calls in the conversation, as clients send them and templates read them."""

from typing import Any

import pytest
from answers import answering

import onward
from onward.chat import ChatTemplate
from onward.errors import RequestError
from onward.protocols import BodyReader
from onward.testing import ByteTokenizer

BEFORE = "{% for m in messages %}{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
AFTER = ">{% endfor %}{{ m.content }};{% endfor %}"
# How templates write arguments, and an empty object.
TEMPLATES = {
    "as JSON": ("{{ c.function.arguments | tojson }}", "{}"),
    "one by one": ("{% for name, value in c.function.arguments | items %}[{{ name }}={{ value }}]{% endfor %}", ""),
    "by a method": ("{% for name, value in c.function.arguments.items() %}[{{ name }}]{% endfor %}", ""),
    "as text": (
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ 1 / 0 }}{% endif %}",
        "{}",
    ),
}
MISSING = object()


def lm_with(template: str) -> onward.LanguageModel:
    lm = answering("plain", "").lm
    return onward.LanguageModel(lm.model, ByteTokenizer(), ChatTemplate(BEFORE + template + AFTER, {}), lm.defaults)


def past(arguments: object, **outer: Any) -> list[dict[str, Any]]:
    function = {"name": "now"} | ({} if arguments is MISSING else {"arguments": arguments})
    call = {"id": "c1", "type": "function", "function": function}
    return [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]


@pytest.mark.parametrize(
    "arguments",
    ["{}", "", " ", "\n", "{ }", None, MISSING, {}],
    ids=lambda value: "missing" if value is MISSING else repr(value),
)
@pytest.mark.parametrize("kind", TEMPLATES)
def test_missing_arguments_are_an_empty_object(kind: str, arguments: object) -> None:
    template, empty = TEMPLATES[kind]
    lm = lm_with(template)
    expected = [f"What time is it?;<now{empty}>;noon;"]
    if (kind, arguments) == ("as text", "{ }"):  # the text that the model wrote
        expected = ["What time is it?;<now{ }>;noon;"]
    read = [lm.decode(lm.chat_prompt(past(arguments)))]
    reader = BodyReader(lm, "m")
    read.append(lm.decode(reader.read("/v1/chat/completions", {"messages": past(arguments)}).requests[0].prompt))
    if not isinstance(arguments, dict):
        call = {"type": "function_call", "call_id": "c1", "name": "now"}
        call |= {} if arguments is MISSING else {"arguments": arguments}
        result = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
        items = [{"role": "user", "content": "What time is it?"}, call, result]
        read.append(lm.decode(reader.read("/v1/responses", {"input": items}).requests[0].prompt))
    assert read == expected * len(read)


@pytest.mark.parametrize("arguments", ["{", "[1]", "null", "5", '{"a": NaN', "now", '"x"'])
@pytest.mark.parametrize("kind", ["as JSON", "one by one"])
def test_arguments_other_than_objects_are_refused_with_their_path(kind: str, arguments: str) -> None:
    lm = lm_with(TEMPLATES[kind][0])
    place = r"messages\[1\]\.tool_calls\[0\]\.function\.arguments must be a JSON object; got "
    with pytest.raises(RequestError, match=place):
        lm.chat_prompt(past(arguments))


def test_accepted_argument_texts() -> None:
    lm = lm_with(TEMPLATES["as JSON"][0])
    for stored, read in (('{"a": "x\ny"}', r'{"a": "x\ny"}'), (r'"{\"a\": 1}"', '{"a": 1}')):
        assert f"<now{read}>" in lm.decode(lm.chat_prompt(past(stored)))
