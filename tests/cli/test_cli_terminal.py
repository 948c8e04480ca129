"""Output that appears on a terminal but not in a pipe."""

import io
import os
import time
from pathlib import Path

import pytest
from prompt_toolkit.history import FileHistory, InMemoryHistory

from onward import MessageDelta, Piece
from onward.cli import repl
from onward.cli.chat import AnswerWriter
from onward.cli.terminal import TextWriter, note, report, waiting
from onward.errors import OnwardWarning


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def stream(monkeypatch: pytest.MonkeyPatch, name: str, *, is_terminal: bool) -> Stream:
    made = Stream(is_terminal)
    monkeypatch.setattr(f"sys.{name}", made)
    monkeypatch.setenv("TERM", "xterm")
    return made


WILD = "a\tb\nc\x1b]0;owned\x07\r\x7f\x9b2Jé✓"


def test_a_pipe_gets_the_unchanged_text(monkeypatch: pytest.MonkeyPatch) -> None:
    out = stream(monkeypatch, "stdout", is_terminal=False)
    writer = TextWriter()
    writer.write(WILD)
    writer.end_line()
    assert out.getvalue() == WILD


def test_a_terminal_gets_visible_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    out = stream(monkeypatch, "stdout", is_terminal=True)
    writer = TextWriter()
    writer.write(WILD)
    assert out.getvalue() == "a\tb\nc␛]0;owned␇␍␡�2Jé✓"
    writer.end_line()
    writer.write("ends\n")
    writer.end_line()
    assert out.getvalue().endswith("✓\nends\n")


@pytest.mark.parametrize(
    ("is_terminal", "delay_s", "shown"), [(True, 0.01, True), (True, 60, False), (False, 0.01, False)]
)
def test_long_waits_are_shown_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, delay_s: float, shown: bool
) -> None:
    err = stream(monkeypatch, "stderr", is_terminal=is_terminal)
    with waiting("loading [demo] …", delay_s=delay_s):
        time.sleep(0.3)
    assert ("loading [demo] …" in err.getvalue()) == shown
    assert bool(err.getvalue()) == shown


def test_errors_and_warnings_take_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    err = stream(monkeypatch, "stderr", is_terminal=False)
    report("error", "one\n  two")
    note("[three] " + "long " * 40)
    assert err.getvalue().splitlines() == ["error: one two", "[three] " + "long " * 40]


def test_no_color_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    err = stream(monkeypatch, "stderr", is_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    with waiting("loading …", delay_s=0):
        time.sleep(0.2)
    note("a note")
    assert "\x1b[3" not in err.getvalue()


@pytest.mark.parametrize(
    ("is_terminal", "term", "shown"),
    [
        (True, "xterm", "\x1b[2mOslo?\x1b[22m\n\nIt rains.\n\nYes."),
        (True, "dumb", "<think>Oslo?</think>It rains.\n\nYes."),
        (False, "xterm", "<think>Oslo?</think>It rains.\n\nYes."),
    ],
)
def test_reasoning_is_dim_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, term: str, shown: str
) -> None:
    out = stream(monkeypatch, "stdout", is_terminal=is_terminal)
    monkeypatch.setenv("TERM", term)
    writer = AnswerWriter(TextWriter())
    for text, delta in (
        ("<think>", MessageDelta()),
        ("Oslo?", MessageDelta(reasoning="Oslo?")),
        ("</think>It rains.", MessageDelta("It rains.")),
        ("\n\nYes.", MessageDelta("\n\nYes.")),
    ):
        writer.write(Piece(text, 1, message=delta))
    assert out.getvalue() == shown


def test_the_history_is_readable_only_by_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "new" / "state"))
    file = repl.state_folder() / "chat_history"
    history = repl._history(file)
    assert isinstance(history, FileHistory)
    history.store_string("Hello there!")
    assert "Hello there!" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.unlink()
    os.mkdir(file)  # it can no longer be written, and the chat continues
    history.store_string("And now?")


def test_an_unwritable_history_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(OnwardWarning, match="history of this chat will not be saved"):
        history = repl._history(tmp_path / "file" / "chat_history")
    assert isinstance(history, InMemoryHistory)


def test_a_wait_with_a_known_end_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    err = stream(monkeypatch, "stderr", is_terminal=True)
    with waiting("loading demo …", delay_s=0) as show:
        time.sleep(0.2)
        show(0.5, "3 failed")
        time.sleep(0.2)
    assert "━━━" in err.getvalue()
    assert "50% 3 failed" in err.getvalue()
