"""The lines of a chat: where they come from, and the commands among them, which begin with a slash."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from onward.cli.chat_session import ChatSession, Conversation
from onward.cli.loading import as_json_or_text
from onward.cli.terminal import count, shortened, summary
from onward.errors import RequestError, warn
from onward.util.option_names import check_option_names

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_KEYS = """\
  //TEXT         send TEXT with one slash in front
  Alt+Enter      begin a new line; so does Enter after a backslash
  Ctrl-C         stop the answer (what is shown stays), or clear the line
  Ctrl-D         leave"""

# Commands of other programs that write a chat to a file and read it.
_PERSISTENCE = ("/save", "/load")

# Options of several texts, of reports, and those that only code can give well.
_NOT_OF_A_CHAT = {
    *("n", "beams", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs"),
    *("draft", "stop_when", "cancel", "logit_bias"),
    *("json_schema", "regex", "grammar", "choice", "constraint"),
}
_ALWAYS_SHOWN = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "seed")
_OF_TEXTS = ("stop", "bad_words")
# What stands for the model's own value.
_DEFAULT = ("-", "default")


class ChatInput(Protocol):
    def read(self) -> str | None:
        """The next message or command, perhaps of several lines; None at the end."""
        ...


class PipedInput:
    """Lines of standard input; one that ends in a backslash continues in the next."""

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
    """The folder for state that is neither configuration nor cache."""
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
    """In `file`, which only its owner can read; in memory alone, with a warning, if it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        warn(f"the history of this chat will not be kept: {file} cannot be written ({error.strerror or error})")
        return InMemoryHistory()

    class ForgivingHistory(FileHistory):
        def store_string(self, string: str) -> None:
            # A disk that is full by now must not end a chat.
            with suppress(OSError):
                super().store_string(string)

    return ForgivingHistory(file)


class SlashCommand(NamedTuple):
    """argument: its name in /help, "" for none. run: does it, and returns the text to print, or None to leave."""

    argument: str
    help: str
    run: "Callable[[ChatSession, str], str | Retry | None]"


class Retry:
    """Returned by a command after which the last question is answered again."""


def run_command(session: ChatSession, line: str) -> str | Retry | None:
    """Run a line that begins with a slash; returns the text to print, a `Retry`, or None to leave.

    Raises:
        RequestError: an unknown command, or one that cannot be done.
    """
    name, argument = [*line.strip().split(maxsplit=1), ""][:2]
    command = COMMANDS.get(name)
    if command is None:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        hint = "`onward chat --session FILE` keeps a chat and continues it; " if name in _PERSISTENCE else hint
        raise RequestError(
            f"unknown command {name}: {hint}/help lists them; a message that begins with a slash is sent with two"
        )
    if argument and not command.argument:
        raise RequestError(f"{name} takes nothing after it; got {argument!r}")
    return command.run(session, argument)


def _help(session: ChatSession, argument: str) -> str:
    lines = [f"  {f'{name} {command.argument}':<15}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, _KEYS])


def _reset(session: ChatSession, argument: str) -> str:
    turns = len(session.conversation.turns)
    session.reset()
    kept = "; the system message stays" if session.conversation.system is not None else ""
    return f"forgot {count(turns, 'question')} and the answers{kept}"


def _system(session: ChatSession, argument: str) -> str:
    if argument:
        system = None if argument == "-" else argument
        session.adopt(Conversation(system, session.conversation.turns))
    system = session.conversation.system
    return "no system message" if system is None else f"system message: {system}"


def _retry(session: ChatSession, argument: str) -> Retry:
    if not session.conversation.turns:
        raise RequestError("/retry answers the last question again, and nothing was asked yet")
    return Retry()


def _undo(session: ChatSession, argument: str) -> str:
    question, _ = session.undo()
    return f"took back {shortened(question, 60)!r} and its answer; {_used(session)}"


def _stats(session: ChatSession, argument: str) -> str:
    rows = {
        "model": session.model,
        "chat": f"{count(len(session.conversation.turns), 'question')}, {_used(session)}",
        "generated": count(session.generated, "token"),
    }
    if session.last is not None:
        rows["last answer"] = summary(session.last)
    return "\n".join(f"  {name:<15}{value}" for name, value in rows.items())


def _used(session: ChatSession) -> str:
    used = session.tokens()
    if used >= session.context:
        return f"the context of {session.context:,} tokens is full"
    return f"{used:,} of {session.context:,} tokens of context"


def _set(session: ChatSession, argument: str) -> str:
    """Set an option or a variable of the chat template, or show it, or all.

    Raises:
        RequestError: an unknown name, or a value outside its range; nothing is changed.
    """
    name, text = [*argument.split(maxsplit=1), "", ""][:2]
    if not name:
        return _show_all(session)
    name = name.replace("-", "_")
    options, template = _options(), sorted(_variables(session))
    if name in _NOT_OF_A_CHAT:
        raise RequestError(f"{name} is no option of a chat; those are {', '.join([*options, *template])}")
    check_option_names([name], [*options, *template])
    if text:
        value = text if name in _OF_TEXTS and not text.startswith("[") else as_json_or_text(name, text)
        current = session.options if name in options else session.variables
        changed = {key: old for key, old in current.items() if key != name}
        if text not in _DEFAULT:
            changed[name] = value
        if name in options:
            session.lm.defaults.replace(**changed)  # which checks them
            session.options = changed
        else:
            session.variables = changed
    return f"{name} {_values(session).get(name, 'as the chat template has it')}"


def _show_all(session: ChatSession) -> str:
    """A line for each option that changes an answer, and the names of the others."""
    values, options = _values(session), _options()
    shown = {*_ALWAYS_SHOWN, *session.options, *session.variables}
    lines = {name: value for name, value in values.items() if name in shown or value != _shown(name, options[name])}
    others = [name for name in (*options, *sorted(_variables(session))) if name not in lines]
    width = max(map(len, lines)) + 2
    rows = [f"  {name:<{width}}{value}" for name, value in lines.items()]
    return "\n".join([*rows, f"  {'others':<{width}}{', '.join(others)}"])


def _options() -> dict[str, Any]:
    """The options of a chat, with Onward's own values."""
    from onward.language_model import GenerateOptions

    neutral = GenerateOptions()
    names = [field.name for field in dataclasses.fields(neutral) if field.name not in _NOT_OF_A_CHAT]
    return {name: getattr(neutral, name) for name in names}


def _variables(session: ChatSession) -> frozenset[str]:
    template = session.lm.chat_template
    return frozenset() if template is None else template.variables - set(_options())


def _values(session: ChatSession) -> dict[str, str]:
    """The options and variables of the next answer."""
    options = session.lm.defaults.replace(**session.options)
    values = {name: _shown(name, getattr(options, name)) for name in _options()}
    if session.options.get("max_new_tokens") is None:
        values["max_new_tokens"] = "what is left of the context"
    return values | {name: json.dumps(value, ensure_ascii=False) for name, value in session.variables.items()}


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "a fresh one each time" if name == "seed" else "none"
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False) if value else "none"
    return json.dumps(value)


COMMANDS = {
    "/help": SlashCommand("", "show this", _help),
    "/reset": SlashCommand("", "begin a new chat", _reset),
    "/system": SlashCommand("TEXT", "set the system message ('-' removes it), or show it", _system),
    "/set": SlashCommand("NAME X", "set an option ('-': the model's own), or show it, or all", _set),
    "/retry": SlashCommand("", "answer the last question again", _retry),
    "/undo": SlashCommand("", "take back the last question and its answer", _undo),
    "/stats": SlashCommand("", "how long the chat is, and how fast the last answer was", _stats),
    "/exit": SlashCommand("", "leave", lambda session, argument: None),
}
