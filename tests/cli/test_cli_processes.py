"""Behavior of a real process: signals, closed pipes, a terminal."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, PROGRAM

# More than a pipe holds: it waits to be read or interrupted, however fast the model is.
ENDLESS = ["generate", "Once upon a time", "--ignore-eos", "-n", "60000", "--max-seq-len", "64000"]

# The child makes the terminal its own, so that a ^C written to it becomes a signal.
TERMINAL_PROGRAM = [
    sys.executable,
    "-c",
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from onward.cli.main import main; main()",
]


# Escape sequences with which the line editor takes over the terminal, and restores it.
EDITING, ACCEPTED = "\x1b[?2004h", "\x1b[?2004l"


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell starts what runs in its background deaf to interrupts, and its children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_closed_pipe_is_no_error() -> None:
    with subprocess.Popen([*PROGRAM, *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.read(5)
        run.stdout.close()
        errors = run.stderr.read()
        assert run.wait(timeout=60) != 0
    assert errors.count(b"\n") == 1
    assert errors.startswith(b"warning: max_seq_len")


def test_an_interrupt_ends_generate_with_130() -> None:
    with subprocess.Popen([*PROGRAM, *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as run:
        assert run.stdout is not None
        assert run.stdout.read(5)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
        assert run.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("command", [["--version"], ["generate", "Once", "-n", "2"], ["info", "--json"]], ids=" ".join)
def test_a_full_disk_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*PROGRAM, *command], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=120
        )
    assert (done.returncode, done.stderr) == (2, "error: standard output cannot be written: No space left on device\n")


def test_closed_streams_print_no_traceback() -> None:
    def run(closed: str, *command: str) -> subprocess.CompletedProcess[str]:
        shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *PROGRAM, *command]
        return subprocess.run(shell, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)

    out = run(">&-", "generate", "Once", "-n", "2")
    assert (out.returncode, out.stderr.count("\n")) == (2, 1)
    assert out.stderr.startswith("error: standard output is closed")
    silent = run("2>&-", "generate", "Once", "-n", "-2")
    assert (silent.returncode, silent.stdout) == (2, "")
    unread = run("<&-", "generate", "-")
    assert (unread.returncode, unread.stderr.count("\n")) == (2, 1)
    assert "standard input is closed" in unread.stderr


class Terminal:
    """A program on a pseudo-terminal: collects its output and sends typed input."""

    def __init__(self, arguments: list[str], state: Path) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        environment = ENVIRONMENT | {
            "TERM": "xterm",
            "NO_COLOR": "1",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # no terminal answers here
            "XDG_STATE_HOME": str(state),
        }
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = subprocess.Popen(
            [*TERMINAL_PROGRAM, *arguments], env=environment, start_new_session=True, **streams
        )
        os.close(theirs)
        self._unread = ""

    def expect(self, text: str, then: int = 0) -> str:
        """Wait until `text` and `then` more characters were written; returns all up to there."""
        deadline = time.monotonic() + 90
        while (at := self._unread.find(text)) < 0 or len(self._unread) < at + len(text) + then:
            left = deadline - time.monotonic()
            if left < 0 or not select.select([self._ours], [], [], left)[0]:
                pytest.fail(f"no {text!r} in {self._unread!r}")
            try:
                self._unread += os.read(self._ours, 4096).decode(errors="replace")
            except OSError:  # the program has gone
                pytest.fail(f"no {text!r} before the end of {self._unread!r}")
        end = at + len(text) + then
        read, self._unread = self._unread[:end], self._unread[end:]
        return read

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def close(self) -> None:
        os.close(self._ours)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=60)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_a_chat_on_a_terminal(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(["chat", "--ignore-eos", "--max-seq-len", "8000"], tmp_path)
    terminals.append(terminal)
    terminal.expect("/help lists the commands")
    terminal.expect(EDITING)
    terminal.type("Tell me\x1b\ra story.\r")  # Alt+Enter begins a line, Enter sends
    terminal.expect(ACCEPTED, then=200)
    terminal.type("\x03")
    terminal.expect("stays in the chat")
    terminal.expect(EDITING)
    terminal.type("/stats\r")
    terminal.expect("1 question, ")
    terminal.expect(EDITING)
    terminal.type("half a line\x03/system Be brief.\r")  # Ctrl-C clears the line
    terminal.expect("system message: Be brief.")
    terminal.expect(EDITING)
    terminal.type("\x03")
    terminal.expect("Ctrl-D or /exit quits")
    terminal.expect(EDITING)
    terminal.type("\x04")
    assert terminal.process.wait(timeout=60) == 0
    history = tmp_path / "onward" / "chat_history"
    assert "a story." in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_generate_on_a_terminal_ends_with_statistics(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(["generate", "Once upon a time", "-n", "5", "--seed", "3"], tmp_path)
    terminals.append(terminal)
    assert "\r\n" in terminal.expect("5 tokens (cut) · ")
    terminal.expect("tok/s")
    terminal.expect("seed 3")
    assert terminal.process.wait(timeout=60) == 0
