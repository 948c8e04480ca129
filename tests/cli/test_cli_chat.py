"""A chat: its commands, its context, and its state after an interrupt."""

import itertools
from collections.abc import Iterator

import pytest
from command_line import Cli

import onward
from onward.cli.chat import converse
from onward.cli.chat_session import ChatSession, Conversation
from onward.cli.repl import COMMANDS
from onward.errors import ContextOverflowError, RequestError

GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
FLAGS = ("-t", "0", "-n", "12")


@pytest.fixture
def session(lm: onward.LanguageModel) -> ChatSession:
    return ChatSession(lm, "demo", GREEDY, Conversation())


def ignore(piece: onward.Piece) -> None:
    pass


def answers(lm: onward.LanguageModel, *questions: str, system: str | None = None) -> list[str]:
    """The model's answers to successive questions."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        found.append(lm.chat(messages, **GREEDY).text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


# ── through a pipe ────────────────────────────────────────────────────────────────────────────────────────


def test_lines_are_answered_in_turn(cli: Cli, loaded: onward.LanguageModel) -> None:
    result = cli("chat", *FLAGS, input="Hello there!\n\nTell me a story.\n")
    assert result.code == 0
    assert result.out == "".join(f"{text}\n" for text in answers(loaded, "Hello there!", "Tell me a story."))


def test_a_backslash_continues_on_the_next_line(cli: Cli, loaded: onward.LanguageModel) -> None:
    want = answers(loaded, "Tell me\na story.")[0] + "\n"
    assert cli("chat", *FLAGS, input="Tell me\\\na story.\n").out == want
    assert cli("chat", *FLAGS, input="Tell me\\\na story.\\\n").out == want


def test_a_message_may_begin_with_a_slash(cli: Cli, loaded: onward.LanguageModel) -> None:
    assert cli("chat", *FLAGS, input="//help\n").out.strip() == answers(loaded, "/help")[0].strip()


def test_the_system_message_is_sent(cli: Cli, loaded: onward.LanguageModel) -> None:
    want = answers(loaded, "Hello there!", system="Be brief.")[0] + "\n"
    assert cli("chat", *FLAGS, "--system", "Be brief.", input="Hello there!\n").out == want
    assert cli("chat", *FLAGS, input="/system Be brief.\nHello there!\n").out.endswith(want)
    assert "no system message" in cli("chat", "--system", "Be brief.", input="/system -\n").out


def test_every_command(cli: Cli, loaded: onward.LanguageModel) -> None:
    chat = ["Hello there!", "/stats", "/reset", "/stats", "Hello there!"]
    after = ["/retry", "/undo", "/set temperature 0.5"]
    lines = [*chat, *after, "/system Be brief.", "/system", "/help", "/exit", "never read"]
    result = cli("chat", *FLAGS, input="\n".join(lines))
    assert (result.code, {name for line in lines if (name := line.split()[0]) in COMMANDS}) == (0, set(COMMANDS))
    output = iter(result.out.splitlines())
    for expected in (
        "1 question, ",
        "removed 1 question",
        "0 questions, 0 of 1,024 tokens",
        "removed 'Hello there!' and its answer",
        "temperature 0.5",
        "system message: Be brief.",
        *COMMANDS,
    ):
        assert any(expected in line for line in output), expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/stts", "did you mean /stats"),
        ("/", "/help"),
        ("/reset now", "'now'"),
        ("/save", "onward chat --session FILE"),
        ("/load chat.json", "onward chat --session FILE"),
    ],
)
def test_a_failed_command_is_reported_and_the_chat_continues(
    cli: Cli, loaded: onward.LanguageModel, line: str, expected: str
) -> None:
    result = cli("chat", *FLAGS, input=f"{line}\nHello there!\n")
    assert result.code == 2
    assert result.err.splitlines()[0].startswith("error: ")
    assert expected in result.err.splitlines()[0]
    assert result.out == answers(loaded, "Hello there!")[0] + "\n"


def test_invalid_utf8_is_reported(cli: Cli, loaded: onward.LanguageModel) -> None:
    result = cli("chat", *FLAGS, input=b"\xff\nHello there!\n")
    assert (result.code, "UTF-8" in result.err) == (2, True)
    assert result.out == answers(loaded, "Hello there!")[0] + "\n"


# ── the context ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_may_fill_the_context(cli: Cli) -> None:
    result = cli("chat", "--max-seq-len", "60", "--ignore-eos", "--seed", "1", input="Hello there!\n/stats\n")
    assert result.code == 0
    assert "the context of 60 tokens is full" in result.err
    assert "/reset" in result.err


def test_stats_report_a_full_context(cli: Cli) -> None:
    out = cli("chat", "--max-seq-len", "60", "--ignore-eos", "--seed", "1", input="Hello there!\n/stats\n").out
    assert "1 question, the context of 60 tokens is full" in out


def test_a_message_too_long_for_the_context_changes_nothing(session: ChatSession) -> None:
    session.ask("Hello there!", ignore)
    before = session.conversation.messages()
    with pytest.raises(ContextOverflowError, match=r"[\d,]+ tokens long, and the context holds 1,024.*/reset"):
        session.ask("word " * 2000, ignore)
    assert session.conversation.messages() == before
    assert session.ask("And now?", ignore).completion is not None


def test_very_long_chats_end_with_a_message_instead_of_a_crash(session: ChatSession) -> None:
    """However little of the context is left, a message is answered or refused, and nothing is lost."""

    def fill(words: int) -> int:
        session.conversation = Conversation(turns=[("a " * words, "b")])
        return session.tokens()

    first = next(words for words in itertools.count(900) if fill(words) > session.context - 8)
    for words in itertools.count(first):
        fill(words)
        try:
            session.ask("c", ignore)
        except ContextOverflowError:
            break
        assert len(session.conversation.turns) == 2
    assert words > first
    assert session.conversation.turns == [("a " * words, "b")]


def test_a_truncated_answer_is_noted(cli: Cli, loaded: onward.LanguageModel) -> None:
    assert "cut at 3 tokens" in cli("chat", "-t", "0", "-n", "3", input="Tell me a story.\n").err


def test_a_chat_that_the_template_refuses_is_not_adopted(session: ChatSession) -> None:
    session.ask("Hello there!", ignore)
    before = session.conversation
    with pytest.raises(RequestError):
        session.set_conversation(Conversation("\udcff"))
    assert session.conversation is before


# ── interrupts ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shown", [1, 4])
def test_an_interrupted_answer_keeps_its_visible_part(session: ChatSession, shown: int) -> None:
    seen: list[str] = []

    def emit(piece: onward.Piece) -> None:
        seen.append(piece.text)
        if len(seen) == shown:
            raise KeyboardInterrupt

    answer = session.ask("Tell me a story.", emit)
    assert answer.completion is None
    assert answer.text == "".join(seen) != ""
    assert session.conversation.turns == [("Tell me a story.", answer.text)]
    assert session.ask("Go on.", ignore).completion is not None


def test_an_answer_interrupted_at_once_leaves_the_chat_unchanged(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> onward.Completion:
        raise KeyboardInterrupt

    monkeypatch.setattr("onward.cli.chat_session.follow", interrupted)
    assert session.ask("Tell me a story.", ignore).text == ""
    assert session.conversation == Conversation()


class Lines:
    """An input that gives these lines, or raises those that are errors."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines: Iterator[str | type[BaseException]] = iter(lines)

    def read(self) -> str | None:
        line = next(self._lines, None)
        if isinstance(line, type):
            raise line
        return line


def test_an_interrupt_between_answers_ends_only_scripts(session: ChatSession) -> None:
    assert converse(session, Lines(KeyboardInterrupt, "Hello there!").read, on_terminal=True)
    assert len(session.conversation.turns) == 1
    with pytest.raises(KeyboardInterrupt):
        converse(session, Lines(KeyboardInterrupt, "Hello there!").read, on_terminal=False)
