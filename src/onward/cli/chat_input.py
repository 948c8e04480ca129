"""Where the lines of a chat come from: a terminal with editing and history, or a pipe."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from onward.errors import RequestError, warn

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class ChatInput(Protocol):
    def read(self) -> str | None:
        """The next message or command, perhaps of several lines; None at the end."""
        ...


class PipedInput:
    """Lines of standard input; one that ends in a backslash goes on in the next."""

    def __init__(self) -> None:
        self._lines: Iterator[bytes] = iter(sys.stdin.buffer) if sys.stdin is not None else iter(())

    def read(self) -> str | None:
        parts: list[bytes] = []
        for line in self._lines:
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            parts.append(line.removesuffix(b"\\"))
            if not line.endswith(b"\\"):
                break
        if not parts:
            return None
        try:
            return b"\n".join(parts).decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"a line of standard input is not UTF-8 text: byte {error.start}") from error


class TerminalInput:
    """A line editor: history, several lines, completion of the commands.

    Raises KeyboardInterrupt for a Ctrl-C on an empty line; on another it clears the line.
    """

    def __init__(self, commands: Iterable[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter

        self._session: PromptSession[str] = PromptSession(
            [("bold", "> ")],
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_key_bindings(),
            history=_history(state_folder() / "chat_history"),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
        )

    def read(self) -> str | None:
        try:
            return self._session.prompt()
        except EOFError:
            return None


def state_folder() -> Path:
    """Where a user's programs keep what is no setting and no cache."""
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "onward"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "onward"


def _key_bindings() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: "KeyPressEvent") -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: "KeyPressEvent") -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def _history(file: Path) -> "History":
    """Kept in `file`, which only its owner can read; in memory alone, with a warning, where that cannot be."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        warn(f"the history of this chat will not be kept: {file} cannot be written ({error.strerror or error})")
        return InMemoryHistory()

    class KeptHistory(FileHistory):
        def store_string(self, string: str) -> None:
            # A disk that is full by now must not end a chat.
            with suppress(OSError):
                super().store_string(string)

    return KeptHistory(file)
