"""Commands that change a running chat: retry, undo, other options, no thinking; and a recap."""

import dataclasses
from pathlib import Path

import pytest
from command_line import Cli

import onward
from onward.chat import ChatTemplate
from onward.cli.chat import recap
from onward.cli.chat_session import ChatSession, Conversation
from onward.cli.repl import run_command
from onward.errors import RequestError
from onward.sampling import sample_seed

GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
SAMPLED = {"temperature": 1.0, "max_new_tokens": 12, "seed": 7}
THINKING = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %} at once{% endif %}{{ mood }}"
)


def ignore(piece: onward.Piece) -> None:
    pass


@pytest.fixture
def session(lm: onward.LanguageModel) -> ChatSession:
    return ChatSession(lm, "demo", SAMPLED, Conversation())


@pytest.fixture
def thinking(lm: onward.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> onward.LanguageModel:
    """A model whose template has a switch for thinking, which the commands find loaded."""
    model = onward.LanguageModel(lm.model, lm.tokenizer, ChatTemplate(THINKING, {}), lm.defaults)
    monkeypatch.setattr("onward.cli.chat.load_model", lambda flags, drafting, adapting: model)
    monkeypatch.setattr("onward.cli.generate.load_model", lambda flags, drafting, adapting: model)
    return model


# ── /retry and /undo ──────────────────────────────────────────────────────────────────────────────────────


def test_a_retry_equals_the_question_with_a_new_seed(session: ChatSession) -> None:
    first = session.ask("Tell me a story.", ignore).text
    answers = [session.retry(ignore).text for _ in range(2)]
    prompt = [{"role": "user", "content": "Tell me a story."}]
    assert answers == [session.lm.chat(prompt, **SAMPLED | {"seed": sample_seed(7, at)}).text for at in (1, 2)]
    assert len({first, *answers}) == 3
    assert session.conversation.turns == [("Tell me a story.", answers[-1])]
    # The next question starts again with the original seed.
    assert session.ask("And then?", ignore).completion.seed == 7


def test_a_greedy_retry_notes_that_it_is_the_same(cli: Cli, loaded: onward.LanguageModel) -> None:
    result = cli("chat", "-t", "0", "-n", "100", input="Hello there!\n/retry\n")
    assert (result.code, "the same answer again; /set temperature" in result.err) == (0, True)
    first, second = result.out[: len(result.out) // 2], result.out[len(result.out) // 2 :]
    assert first == second


def test_a_retry_interrupted_at_once_keeps_the_answer(session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session.ask("Tell me a story.", ignore)
    turns = list(session.conversation.turns)

    def interrupted(*arguments: object) -> onward.Completion:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("onward.cli.chat_session.follow", interrupted)
        session.retry(ignore)
    assert session.conversation.turns == turns
    session.options["temperature"] = -1.0
    with pytest.raises(RequestError):
        session.retry(ignore)
    assert session.conversation.turns == turns


def test_undo_removes_one_turn_without_a_new_prefill(session: ChatSession) -> None:
    session.ask("Hello there!", ignore)
    turns = list(session.conversation.turns)
    session.ask("And then?", ignore)
    reply = run_command(session, "/undo")
    assert isinstance(reply, str)
    assert "And then?" in reply
    assert session.conversation.turns == turns
    completion = session.ask("Who was she?", ignore).completion
    assert completion is not None
    assert completion.cached_tokens > 0


def test_undo_of_an_empty_chat(session: ChatSession) -> None:
    for command in ("/undo", "/retry"):
        with pytest.raises(RequestError, match="nothing was asked yet"):
            run_command(session, command)


def test_a_retried_chat_is_saved(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "chat.session"
    ask = ("chat", "-t", "1", "-n", "12", "--seed", "7", "--session", str(file))
    result = cli(*ask, input="Tell me a story.\n/retry\nAnd then?\n/undo\n")
    assert result.code == 0
    resumed = ChatSession(loaded, "demo", SAMPLED, Conversation())
    resumed.open(file)
    ((question, answer),) = resumed.conversation.turns
    assert question == "Tell me a story."
    assert answer == loaded.chat([{"role": "user", "content": question}], **SAMPLED | {"seed": sample_seed(7, 1)}).text


# ── /set ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_option_is_set_for_the_next_answer(cli: Cli, loaded: onward.LanguageModel) -> None:
    lines = ["/set temperature 0", "/set max-new-tokens 5", "Tell me a story."]
    result = cli("chat", "-t", "1", "--seed", "1", input="\n".join(lines))
    want = loaded.chat([{"role": "user", "content": "Tell me a story."}], temperature=0, max_new_tokens=5).text
    assert result.out.endswith(f"{want}\n")
    assert result.out.startswith("temperature 0\nmax_new_tokens 5\n")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("temperature 0.5", {"temperature": 0.5}),
        ("stop The end", {"stop": "The end"}),
        ('stop ["a", "b"]', {"stop": ["a", "b"]}),
        ("eos [5, 6]", {"eos": [5, 6]}),
        ("seed null", {"seed": None}),
        ("max_new_tokens null", {"max_new_tokens": None}),
        ("ignore_eos true", {"ignore_eos": True}),
    ],
)
def test_values_are_json_or_text(session: ChatSession, line: str, value: dict[str, object]) -> None:
    run_command(session, f"/set {line}")
    assert session.options == SAMPLED | value
    assert session.ask("Hi", ignore).completion is not None
    run_command(session, f"/set {line.split()[0]} -")
    assert session.options == {name: old for name, old in SAMPLED.items() if name not in value}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("temprature 0.5", "did you mean temperature"),
        ("max_tokens 5", "did you mean max_new_tokens"),
        ("temperature warm", "temperature"),
        ("temperature -1", "temperature"),
        ("top_p -1", "top_p"),
        ("n 3", "not an option of a chat"),
        ("enable_thinking false", "unknown option 'enable_thinking'"),
    ],
)
def test_invalid_values_change_nothing(session: ChatSession, line: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run_command(session, f"/set {line}")
    assert session.options == SAMPLED


def test_set_shows_the_effective_options(session: ChatSession, lm: onward.LanguageModel) -> None:
    shown = run_command(session, "/set")
    assert isinstance(shown, str)
    rows = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert rows["temperature"] == "1.0"
    assert rows["seed"] == "7"
    names = {field.name for field in dataclasses.fields(onward.SamplingParams)} - {"logit_bias"}
    assert {*rows} | {*rows["others"].split(", ")} >= names
    assert run_command(session, "/set seed") == "seed 7"
    plain = ChatSession(lm, "demo", {}, Conversation())
    assert run_command(plain, "/set temperature") == f"temperature {lm.defaults.temperature}"
    assert run_command(plain, "/set max_new_tokens") == "max_new_tokens the rest of the context"


# ── variables of the template ─────────────────────────────────────────────────────────────────────────────


def test_thinking_can_be_turned_off(cli: Cli, thinking: onward.LanguageModel) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    on = thinking.chat(messages, **GREEDY).text
    off = thinking.chat(messages, enable_thinking=False, **GREEDY).text
    assert on != off
    flags = ("-t", "0", "-n", "12")
    assert cli("chat", *flags, "--no-thinking", input="Hi\n").out.strip() == off.strip()
    assert cli("chat", *flags, "--template-option", "enable_thinking=false", input="Hi\n").out.strip() == off.strip()
    assert cli("chat", *flags, input="/set enable_thinking false\nHi\n").out.endswith(f"{off}\n")
    assert cli("generate", "--chat", *flags, "--no-thinking", "Hi").out == off
    assert cli("generate", "--chat", *flags, "--thinking", "Hi").out == on
    mood = thinking.chat(messages, mood="sad", **GREEDY).text
    assert cli("generate", "--chat", *flags, "--template-option", "mood=sad", "Hi").out == mood


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--chat", "--no-thinking"), "--no-thinking: the chat template of demo has no switch for thinking"),
        (("--chat", "--thinking"), "--thinking: the chat template of demo has no switch for thinking"),
        (("--chat", "--template-option", "mood=sad"), "no variable 'mood'"),
        (("--chat", "--template-option", "mood"), "NAME=VALUE"),
        (("--no-thinking",), "need --chat"),
    ],
)
def test_a_template_without_the_variable(
    cli: Cli, loaded: onward.LanguageModel, flags: tuple[str, ...], message: str
) -> None:
    result = cli("generate", "Hi", *flags)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


# ── recap ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_recap_shows_the_last_turns_on_short_lines() -> None:
    turns = [(f"question {number}", "word " * 100) for number in range(5)]
    lines = recap(Conversation("Be brief.", turns), 60).splitlines()
    assert [line for line in lines if line.startswith("> ")] == ["> question 3", "> question 4"]
    assert all(len(line) < 120 for line in lines)
    assert lines[1].endswith("word…")
    wide = recap(Conversation(turns=[("日本" * 50, "ok")]), 60).splitlines()[0]
    assert len(wide) == 31  # two columns each, and the cut
