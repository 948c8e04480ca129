"""A turn of a chat processes only new tokens; `--session` restores them in the next run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from safetensors import safe_open

import onward
from onward.cli.chat import converse
from onward.cli.chat_session import ChatSession, Conversation
from onward.errors import OnwardError, SessionError

GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
FLAGS = ("-t", "0", "-n", "12")
QUESTIONS = ["Hello there!", "Tell me a story.", "And then?", "Who was she?", "What is the weather like?"]


def ignore(piece: onward.Piece) -> None:
    pass


def processed(file: Path) -> int:
    """How many tokens a saved session holds."""
    with safe_open(file, "pt") as content:
        return len(content.get_tensor("tokens"))


def test_the_fifth_turn_of_a_chat_processes_only_new_tokens(lm: onward.LanguageModel) -> None:
    """Counted where the model runs."""
    counts: list[int] = []

    def forward(tokens: Any, *arguments: Any, **options: Any) -> Any:
        counts.append(tokens.numel())
        return lm.model.forward(tokens, *arguments, **options)

    counted = onward.LanguageModel(
        dataclasses.replace(lm.model, forward=forward), lm.tokenizer, lm.chat_template, lm.defaults, compile="eager"
    )
    chat = ChatSession(counted, "demo", GREEDY, Conversation("Be brief."))
    for question in QUESTIONS:
        messages = chat.conversation.messages()
        before = 0 if len(messages) < 2 else len(lm.chat_template.render(messages, add_generation_prompt=False))
        prompt = lm.chat_prompt(chat.conversation.messages(question))
        new = prompt if before == 0 else lm.encode(rest(lm, chat, question, before), add_special_tokens=False)
        counts.clear()
        completion = chat.ask(question, ignore).completion
        assert completion is not None
        assert counts[1:] == [1] * (len(completion.token_ids) - 1)
        # An answer's last token was not processed; and its text may be cut into other tokens than were generated.
        assert len(new) <= counts[0] <= len(new) + 4
        assert counts[0] == completion.prompt_tokens - completion.cached_tokens
    assert completion.prompt_tokens > 100
    assert counts[0] < 30


def rest(lm: onward.LanguageModel, chat: ChatSession, question: str, before: int) -> str:
    assert lm.chat_template is not None
    return lm.chat_template.render(chat.conversation.messages(question))[before:]


def test_a_chat_continues_in_the_next_run(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "chat.session"
    whole = cli("chat", *FLAGS, input="\n".join(QUESTIONS)).out
    parts = [cli("chat", *FLAGS, "--session", str(file), input=question) for question in QUESTIONS]
    assert [part.code for part in parts] == [0] * len(QUESTIONS)
    assert "".join(part.out for part in parts) == whole
    chat = ChatSession(loaded, "demo", GREEDY, Conversation())
    chat.open(file)
    assert len(chat.conversation.turns) == len(QUESTIONS)
    last = chat.ask("Go on.", ignore).completion
    assert last is not None
    assert last.cached_tokens == processed_before(chat, loaded)
    assert last.prompt_tokens - last.cached_tokens < 30


def processed_before(chat: ChatSession, lm: onward.LanguageModel) -> int:
    """The tokens that the run before has processed and that the prompt begins with."""
    lm.prefix_memory = lm.prefix_memory  # which clears the entries of the chat from the cache
    fresh = ChatSession(lm, "demo", GREEDY, Conversation())
    for question in QUESTIONS:
        fresh.ask(question, ignore)
    last = fresh.ask("Go on.", ignore).completion
    assert last is not None
    return last.cached_tokens


def test_the_file_is_written_every_turn(lm: onward.LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "chat.session"
    chat = ChatSession(lm, "demo", GREEDY, Conversation())
    chat.open(file)
    assert processed(file) == 0
    seen = []

    class Lines:
        def __init__(self) -> None:
            self.left = [*QUESTIONS[:2], "/reset", "/system Be brief.", "/nonsense", KeyboardInterrupt]

        def read(self) -> str | None:
            seen.append((processed(file), len(onward.Session.load(file, lm).notes["conversation"])))
            line = self.left.pop(0)
            if not isinstance(line, str):
                raise line
            return line

    with pytest.raises(KeyboardInterrupt):
        converse(chat, Lines().read, on_terminal=False)
    tokens = [count for count, _ in seen]
    assert 0 == tokens[0] < tokens[1] < tokens[2]
    assert tokens[3:] == [0, 0, 0], "what was reset is in the file no more"
    assert seen[4][1] > seen[3][1]


def test_an_interrupted_answer_is_saved(cli: Cli, lm: onward.LanguageModel, loaded: Any, tmp_path: Path) -> None:
    file, shown = tmp_path / "chat.session", []

    def interrupted(stream: Any, emit: Any) -> None:
        for piece in stream:
            emit(piece)
            shown.append(piece.text)
            if len(shown) == 4:
                raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onward.cli.chat_session.follow", interrupted)
        assert cli("chat", *FLAGS, "--session", str(file), input="Tell me a story.").code == 130
    chat = ChatSession(lm, "demo", GREEDY, Conversation())
    chat.open(file)
    assert chat.conversation.turns == [("Tell me a story.", "".join(shown))]
    prompt = lm.chat_prompt(chat.conversation.messages("Go on."))
    assert processed(file) > len(lm.chat_prompt([{"role": "user", "content": "Tell me a story."}]))
    answer = chat.ask("Go on.", ignore)
    assert answer.text == lm.generate(prompt, **GREEDY).text


def test_the_system_message_may_change_between_runs(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    file = str(tmp_path / "chat.session")
    cli("chat", *FLAGS, "--session", file, "--system", "Be brief.", input="Hello there!")
    assert "system message: Be brief." in cli("chat", "--session", file, input="/system").out
    assert "system message: Be long." in cli("chat", "--session", file, "--system", "Be long.", input="/system").out
    assert "system message: Be long." in cli("chat", "--session", file, input="/system").out
    assert "1 question" in cli("chat", "--session", file, input="/stats").out


def test_files_other_than_chats_are_refused_and_left_alone(
    cli: Cli, loaded: onward.LanguageModel, lm: onward.LanguageModel, tmp_path: Path
) -> None:
    story, text, missing = tmp_path / "story.session", tmp_path / "notes.txt", tmp_path / "no" / "folder"
    session = onward.Session(lm)
    session.generate("Once upon a time", **GREEDY)
    session.save(story)
    text.write_text("my notes")
    for file, expected in ((story, "without a chat"), (text, "not a saved session"), (missing, "cannot be written")):
        before = file.read_bytes() if file.exists() else None
        result = cli("chat", "--session", str(file), input="Hello there!")
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("error: ")
        assert expected in result.err
        assert (file.read_bytes() if file.exists() else None) == before


def test_a_chat_that_cannot_be_saved_continues_with_a_warning(lm: onward.LanguageModel, tmp_path: Path) -> None:
    chat = ChatSession(lm, "demo", GREEDY, Conversation())
    chat.open(tmp_path / "chat.session")
    with pytest.MonkeyPatch.context() as patch:

        def full(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("os.fsync", full)
        chat.ask("Hello there!", ignore)
        with pytest.raises(SessionError, match="No space left on device"):
            chat.save()
        assert processed(tmp_path / "chat.session") == 0
    chat.ask("And then?", ignore)
    chat.save()
    assert processed(tmp_path / "chat.session") > 0


def test_another_models_chat_is_refused(lm: onward.LanguageModel, tmp_path: Path) -> None:
    chat = ChatSession(lm, "demo", GREEDY, Conversation())
    chat.open(tmp_path / "chat.session")
    chat.ask("Hello there!", ignore)
    chat.save()
    other = ChatSession(onward.load("demo", quantize="int8"), "demo", GREEDY, Conversation())
    with pytest.raises(OnwardError, match="the session of another model"):
        other.open(tmp_path / "chat.session")
    assert other.conversation == Conversation()
