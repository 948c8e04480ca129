"""A conversation is stored in the notes of a saved session, and invalid notes are refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import onward
from onward.cli.chat_session import ChatSession, Conversation
from onward.errors import SessionError

TEXTS = st.text(st.characters(codec="utf-8"))


@given(st.none() | TEXTS, st.lists(st.tuples(TEXTS, TEXTS), max_size=4))
def test_the_conversation_is_the_sessions_note(system: str | None, turns: list[tuple[str, str]]) -> None:
    conversation = Conversation(system, turns)
    assert Conversation.from_json(conversation.to_json()) == conversation


def test_messages_are_those_of_templates() -> None:
    conversation = Conversation("Be brief.", [("Hi", "Hello")])
    roles = [(message["role"], message["content"]) for message in conversation.messages("And?")]
    assert roles == [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "And?")]


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ("not JSON", "Expecting value"),
        ("[" * 100_000, "nest"),
        ("[]", "'turns'"),
        ("{}", "'turns'"),
        ('{"system": null}', "'turns'"),
        ('{"system": null, "turns": [], "more": 1}', "'turns'"),
        ('{"system": 5, "turns": []}', "system message"),
        ('{"system": null, "turns": {}}', "pairs of strings"),
        ('{"system": null, "turns": ["Hi"]}', "pairs of strings"),
        ('{"system": null, "turns": [["Hi"]]}', "pairs of strings"),
        ('{"system": null, "turns": [["Hi", null]]}', "pairs of strings"),
    ],
)
def test_a_session_without_a_conversation_is_refused_and_not_overwritten(
    lm: onward.LanguageModel, tmp_path: Path, note: str, expected: str
) -> None:
    file = tmp_path / "chat.session"
    session = onward.Session(lm)
    session.notes["conversation"] = note
    session.save(file)
    before = file.read_bytes()
    chat = ChatSession(lm, "demo", {}, Conversation())
    with pytest.raises(SessionError, match=f"damaged chat: .*{expected}"):
        chat.open(file)
    assert chat.conversation == Conversation()
    assert file.read_bytes() == before
