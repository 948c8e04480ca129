"""The input of a chat: lines from a terminal or a pipe, and the commands that begin with a slash."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onward.cli.chat_session import ChatSession, Conversation
from onward.cli.inputs import as_json_or_text
from onward.cli.terminal import count, shortened, summary
from onward.errors import RequestError, warn
from onward.util.option_names import check_option_names

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_KEYS = """\
  //TEXT         send TEXT with one slash in front
  Alt+Enter      begin a new line; also Enter after a backslash
  Ctrl-C         stop the answer (the text so far stays), or clear the line
  Ctrl-D         quit"""

# Options for multiple texts, reports or callers in Python.
_UNAVAILABLE = {
    *("n", "beams", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs", "sampling_logprobs"),
    *("taps", "steer", "prompt_embeds", "draft", "stop_when", "cancel", "logit_bias"),
    *("json_schema", "regex", "grammar", "choice", "constraint"),
}
_ALWAYS_SHOWN = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "seed")
_TEXT_OPTIONS = ("stop", "bad_words")
# Values that reset an option to the model's.
_DEFAULT = ("-", "default")


def piped_input() -> Callable[[], str | None]:
    """Return a reader of messages from standard input, or None at its end; a backslash at a line's end continues it.

    Raises `RequestError` at the end of an empty input.
    """
    lines: Iterator[bytes] = iter(sys.stdin.buffer) if sys.stdin is not None else iter(())
    is_empty = True

    def read() -> str | None:
        nonlocal is_empty
        parts: list[bytes] = []
        for line in lines:
            is_empty = False
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            parts.append(line.removesuffix(b"\\"))
            if not line.endswith(b"\\"):
                break
        if not parts:
            if is_empty:
                is_empty = False
                raise RequestError("standard input is empty: pipe in one message per line, or chat on a terminal")
            return None
        try:
            return b"\n".join(parts).decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"a line of standard input is not UTF-8 text: byte {error.start}") from error

    return read


def terminal_input() -> Callable[[], str | None]:
    """Return a line editor with history, multiple lines and completion of commands.

    Ctrl-C clears the line; on an empty line it raises KeyboardInterrupt.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    session: PromptSession[str] = PromptSession(
        [("bold", "> ")],
        multiline=True,
        prompt_continuation="  ",
        key_bindings=_key_bindings(),
        history=_history(state_folder() / "chat_history"),
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
    )

    def read() -> str | None:
        try:
            return session.prompt()
        except EOFError:
            return None

    return read


def state_folder() -> Path:
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
    """A history in `file`, readable only by its owner; if it is not writable, warn and keep it in memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        warn(f"the history of this chat will not be saved: {file} cannot be written ({error.strerror or error})")
        return InMemoryHistory()

    class ForgivingHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk must not end the chat
                super().store_string(string)

    return ForgivingHistory(file)


class SlashCommand(NamedTuple):
    """A command. argument: its name in /help, or "". run: returns the text to print, a `Retry`, or None to quit."""

    argument: str
    help: str
    run: "Callable[[ChatSession, str], str | Retry | None]"


class Retry:
    """The result of a command that asks for another answer to the last question."""


def run_command(session: ChatSession, line: str) -> str | Retry | None:
    """Run a line that begins with a slash; return the text to print, a `Retry`, or None to quit."""
    name, argument = [*line.strip().split(maxsplit=1), ""][:2]
    command = COMMANDS.get(name)
    if command is None:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        hint = "`onward chat --session FILE` saves and resumes a chat; " if name in ("/save", "/load") else hint
        raise RequestError(
            f"unknown command {name}: {hint}/help lists the commands, and // begins a message with a slash"
        )
    if argument and not command.argument:
        raise RequestError(f"{name} takes no argument; got {argument!r}")
    return command.run(session, argument)


def _help(session: ChatSession, argument: str) -> str:
    lines = [f"  {f'{name} {command.argument}':<15}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, _KEYS])


def _reset(session: ChatSession, argument: str) -> str:
    turns = len(session.conversation.turns)
    session.reset()
    system = "; the system message stays" if session.conversation.system is not None else ""
    return f"removed {count(turns, 'question')} and the answers{system}"


def _system(session: ChatSession, argument: str) -> str:
    if argument:
        system = None if argument == "-" else argument
        session.set_conversation(Conversation(system, session.conversation.turns))
    system = session.conversation.system
    return "no system message" if system is None else f"system message: {system}"


def _retry(session: ChatSession, argument: str) -> Retry:
    if not session.conversation.turns:
        raise RequestError("nothing was asked yet")
    return Retry()


def _undo(session: ChatSession, argument: str) -> str:
    question, _ = session.undo()
    return f"removed {shortened(question, 60)!r} and its answer; {_used(session)}"


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
    """Set or show an option or a variable of the chat template, or show all of them. An error changes nothing."""
    name, text = [*argument.split(maxsplit=1), "", ""][:2]
    if not name:
        return _show_all(session)
    name = name.replace("-", "_")
    options, template = _options(), sorted(_variables(session))
    if name in _UNAVAILABLE:
        raise RequestError(f"{name} is not an option of a chat; the options are {', '.join([*options, *template])}")
    check_option_names([name], [*options, *template])
    if text:
        value = text if name in _TEXT_OPTIONS and not text.startswith("[") else as_json_or_text(name, text)
        current = session.options if name in options else session.variables
        changed = {key: old for key, old in current.items() if key != name}
        if text not in _DEFAULT:
            changed[name] = value
        if name in options:
            session.lm.defaults.replace(**changed)  # checks them
            session.options = changed
        else:
            session.variables = changed
    return f"{name} {_values(session).get(name, 'as in the chat template')}"


def _show_all(session: ChatSession) -> str:
    values, options = _values(session), _options()
    shown = {*_ALWAYS_SHOWN, *session.options, *session.variables}
    lines = {name: value for name, value in values.items() if name in shown or value != _shown(name, options[name])}
    others = [name for name in (*options, *sorted(_variables(session))) if name not in lines]
    width = max(map(len, lines)) + 2
    rows = [f"  {name:<{width}}{value}" for name, value in lines.items()]
    return "\n".join([*rows, f"  {'others':<{width}}{', '.join(others)}"])


def _options() -> dict[str, Any]:
    from onward.language_model import GenerateOptions

    return {name: value for name, value in vars(GenerateOptions()).items() if name not in _UNAVAILABLE}


def _variables(session: ChatSession) -> frozenset[str]:
    template = session.lm.chat_template
    return frozenset() if template is None else template.variables - set(_options())


def _values(session: ChatSession) -> dict[str, str]:
    options = session.lm.defaults.replace(**session.options)
    values = {name: _shown(name, getattr(options, name)) for name in _options()}
    if session.options.get("max_new_tokens") is None:
        values["max_new_tokens"] = "the rest of the context"
    return values | {name: json.dumps(value, ensure_ascii=False) for name, value in session.variables.items()}


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "a new one each time" if name == "seed" else "none"
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False) if value else "none"
    return json.dumps(value)


COMMANDS = {
    "/help": SlashCommand("", "show this help", _help),
    "/reset": SlashCommand("", "begin a new chat", _reset),
    "/system": SlashCommand("TEXT", "set ('-': remove) or show the system message", _system),
    "/set": SlashCommand("NAME X", "set an option ('-': to the model's default), or show options", _set),
    "/retry": SlashCommand("", "answer the last question again", _retry),
    "/undo": SlashCommand("", "remove the last question and its answer", _undo),
    "/stats": SlashCommand("", "show the length of the chat and the speed of the last answer", _stats),
    "/exit": SlashCommand("", "quit", lambda session, argument: None),
}
