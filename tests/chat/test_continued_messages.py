"""Chats that continue their final message, and prompts without the beginning of an answer."""

from typing import Any

import pytest
import transformers
from answers import ASKED, TEMPLATES, WEATHER, answering
from hypothesis import given
from hypothesis import strategies as st

import onward
from onward.chat import FORMATS, AssistantMessage, ChatTemplate
from onward.errors import RequestError
from onward.protocols import BodyError, BodyReader

TRIMS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
KEEPS = TRIMS.replace(" | trim", "")
SPACED = TRIMS.replace("<{{ m.role }}>", "<{{ m.role }}>\n").replace("</>", "\n</>")
TEXTS = st.text(st.sampled_from("ab \n<>/é"), max_size=8)


def continued(content: Any, role: str = "assistant") -> list[dict[str, Any]]:
    return [*ASKED, {"role": role, "content": content}]


@given(template=st.sampled_from([TRIMS, KEEPS, SPACED]), content=TEXTS, role=st.sampled_from(["assistant", "user"]))
def test_the_prompt_equals_transformers(template: str, content: str, role: str) -> None:
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=onward.load("demo").tokenizer._inner)
    messages = continued(content, role)
    mine = ChatTemplate(template, {})
    arguments = {"chat_template": template, "tokenize": False}
    for options in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        if not content.strip() and options.get("continue_final_message"):
            continue  # the peer cannot find it
        peers = peer.apply_chat_template(messages, **{"add_generation_prompt": False} | options, **arguments)
        assert mine.render(messages, **{"add_generation_prompt": False} | options) == peers


def test_the_answer_is_the_rest_of_the_message() -> None:
    chat = answering("hermes", " it rains.")
    prompt = chat.lm.chat_prompt(continued("In Oslo"), {"continue_final_message": True})
    assert chat.lm.decode(prompt).endswith("assistant\nIn Oslo")
    whole = chat.chat(continued("In Oslo"), continue_final_message=True)
    assert whole.message == AssistantMessage(" it rains.")
    messages = [AssistantMessage("In Oslo")]
    assert chat.lm.chat([*ASKED, *messages], continue_final_message=True).message == whole.message
    pieces = list(chat.lm.stream_chat(continued("In Oslo"), continue_final_message=True))
    assert AssistantMessage.of(piece.message for piece in pieces if piece.message) == whole.message
    assert onward.Session(chat.lm).chat(continued("In Oslo"), continue_final_message=True).text == whole.text
    with onward.Engine(chat.lm) as engine:
        assert engine.submit(messages=continued("In Oslo"), continue_final_message=True).result().text == whole.text


@pytest.mark.parametrize(
    ("begins", "rest", "message"),
    [
        ("<think>\nHm", " hm.\n</think>\n\nYes.", AssistantMessage("Yes.", " hm.")),
        ("<think>\nHm.\n</think>\n\nIt", " is.", AssistantMessage(" is.")),
        ("I look", '.<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', None),
    ],
    ids=["reasoning", "content", "call"],
)
def test_reasoning_and_calls_are_parsed_across_the_continuation(begins: str, rest: str, message: Any) -> None:
    chat = answering("hermes", rest)
    answer = chat.chat(continued(begins), continue_final_message=True, tools=[WEATHER])
    if message is not None:
        assert answer.message == message
    else:
        assert answer.message.content == "."
        assert [call.name for call in answer.message.tool_calls] == ["weather"]


@pytest.mark.parametrize("format", sorted(set(TEMPLATES) & set(FORMATS)))
def test_a_constraint_applies_only_to_the_rest(format: str) -> None:
    chat = answering(format, "")
    if chat.lm.message_format.before_content:  # content and calls are messages of their own
        with pytest.raises(RequestError, match="constrained tool calls cannot continue a message"):
            chat.lm.chat(continued("It "), continue_final_message=True, tools=[WEATHER], tool_choice="required")
    answer = chat.chat(continued("It "), continue_final_message=True, choice=["rains", "snows"])
    assert answer.text in ("rains", "snows")
    assert answer.message == AssistantMessage(answer.text)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "cannot be combined"),
    (
        {"continue_final_message": True, "messages": continued(None, "user")},
        "continue_final_message",
        "a text as its",
    ),
    ({"continue_final_message": "yes"}, "continue_final_message", "must be true or false"),
    ({"add_generation_prompt": 1}, "add_generation_prompt", "must be true or false"),
]
CALLS = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
BAD.append(
    ({"continue_final_message": True, "messages": [*ASKED, {"role": "assistant", "content": "x", "tool_calls": CALLS}]},
     "continue_final_message", "without tool calls")
)  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), BAD)
def test_invalid_continuations_are_refused(fields: dict[str, Any], param: str, message: str) -> None:
    lm = answering("hermes", "x").lm
    with pytest.raises(BodyError, match=message) as refused:
        BodyReader(lm, "m").read("/v1/chat/completions", {"messages": ASKED} | fields)
    assert refused.value.param == param
    with pytest.raises(RequestError, match=message):
        lm.chat(**{"messages": ASKED} | fields)


def test_templates_that_hide_the_message_are_refused() -> None:
    with pytest.raises(RequestError, match="does not write the final message"):
        ChatTemplate("{{ messages[0].content }}", {}).render(continued("x"), continue_final_message=True)
