"""A conversation survives its file, and a file survives what is not its conversation."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.cli.conversation import Conversation, load, save
from onward.errors import RequestError

TEXTS = st.text(st.characters(codec="utf-8"))


@given(st.none() | TEXTS, st.lists(st.tuples(TEXTS, TEXTS), max_size=4))
def test_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, system: str | None, turns: list[tuple[str, str]]
) -> None:
    file = tmp_path_factory.getbasetemp() / "round-trip.json"
    conversation = Conversation(system, turns)
    save(conversation, file, "demo")
    assert load(file) == conversation


def test_messages_are_what_templates_take() -> None:
    conversation = Conversation("Be brief.", [("Hi", "Hello")])
    roles = [(message["role"], message["content"]) for message in conversation.messages("And?")]
    assert roles == [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "And?")]


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("not JSON", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "'messages'"),
        ("{}", "'messages'"),
        ('{"messages": {}}', "'messages'"),
        ('{"messages": ["Hi"]}', "message 1"),
        ('{"messages": [{"role": "user"}]}', "'content'"),
        ('{"messages": [{"role": "user", "content": "Hi", "tools": []}]}', "alone"),
        ('{"messages": [{"role": "user", "content": 5}]}', "strings"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "no answer"),
        ('{"messages": [{"role": "assistant", "content": "Hi"}]}', "'user' was expected"),
        ('{"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": ""}]}', "message 2"),
    ],
)
def test_what_is_no_conversation_is_refused_and_not_overwritten(tmp_path: Path, content: str, wanted: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content)
    with pytest.raises(RequestError, match=wanted):
        load(file)
    with pytest.raises(RequestError, match="choose another name"):
        save(Conversation(), file, "demo")
    assert file.read_text() == content


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chat.json"
    save(Conversation(turns=[("one", "1")]), file, "demo")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RequestError, match="No space left"):
        save(Conversation(turns=[("two", "2")]), file, "demo")
    assert load(file).turns == [("one", "1")]
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "chat.json", tmp_path / "link.json"
    save(Conversation(), file, "demo")
    link.symlink_to(file)
    save(Conversation(turns=[("one", "1")]), link, "demo")
    assert link.is_symlink()
    assert json.loads(file.read_text())["messages"]


@pytest.mark.parametrize("name", ["no/such/folder/chat.json", "", "nul\0.json"])
def test_names_that_cannot_be_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError):
        save(Conversation(), tmp_path / name, "demo")
    with pytest.raises(RequestError):
        load(tmp_path / name)
