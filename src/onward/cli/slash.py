"""The commands of a chat, which begin with a slash."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from onward.cli import settings
from onward.cli.conversation import Conversation
from onward.cli.session import ChatSession
from onward.cli.streaming import count, summary
from onward.cli.terminal import shortened
from onward.errors import RequestError

_KEYS = """\
  //TEXT         send TEXT with one slash in front
  Alt+Enter      begin a new line; so does Enter after a backslash
  Ctrl-C         stop the answer (what is shown stays), or clear the line
  Ctrl-D         leave"""

# What other programs call the commands that write a chat to a file and read it.
_PERSISTENCE = ("/save", "/load")


@dataclass(frozen=True)
class SlashCommand:
    """argument: what /help calls it, "" for none. run: does it, and returns what to print, or None for leaving."""

    argument: str
    help: str
    run: "Callable[[ChatSession, str], str | Retry | None]"


class Retry:
    """What a command returns after which the last question is to be answered again."""


def run_command(session: ChatSession, line: str) -> str | Retry | None:
    """Run a line that begins with a slash; returns what to print, what to do, or None for leaving.

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


def _set(session: ChatSession, argument: str) -> str:
    name, value = [*argument.split(maxsplit=1), "", ""][:2]
    if not name:
        return settings.show_all(session)
    return settings.change(session, name, value) if value else settings.show_one(session, name)


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


def _exit(session: ChatSession, argument: str) -> None:
    return None


def _used(session: ChatSession) -> str:
    used = session.tokens()
    if used >= session.context:
        return f"the context of {session.context:,} tokens is full"
    return f"{used:,} of {session.context:,} tokens of context"


COMMANDS = {
    "/help": SlashCommand("", "show this", _help),
    "/reset": SlashCommand("", "begin a new chat", _reset),
    "/system": SlashCommand("TEXT", "set the system message ('-' removes it), or show it", _system),
    "/set": SlashCommand("NAME X", "set an option ('-': the model's own), or show it, or all", _set),
    "/retry": SlashCommand("", "answer the last question again", _retry),
    "/undo": SlashCommand("", "take back the last question and its answer", _undo),
    "/stats": SlashCommand("", "how long the chat is, and how fast the last answer was", _stats),
    "/exit": SlashCommand("", "leave", _exit),
}
