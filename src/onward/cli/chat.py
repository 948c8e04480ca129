"""`onward chat`: a conversation on a terminal, or line by line through a pipe."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from onward.cli.chat_session import ChatAnswer, ChatSession, Conversation
from onward.cli.flags import (
    CHAT,
    AdapterFlags,
    DraftFlags,
    ModelFlags,
    SamplingFlags,
    SourceArgument,
    TemplateFlags,
    flag,
    options_of,
    with_source,
)
from onward.cli.inputs import expanded
from onward.cli.loading import load_model, template_variables
from onward.cli.repl import COMMANDS, ChatInput, PipedInput, Retry, TerminalInput, run_command
from onward.cli.terminal import TextWriter, columns, count, fitted, is_terminal, note, report, shortened, write
from onward.errors import OnwardError

if TYPE_CHECKING:
    from onward.language_model import Piece

# Turns of a resumed chat that are shown again.
_RECAP = 2


def chat(
    source: SourceArgument = None,
    *,
    system: str | None = flag("The system message.", group=CHAT),
    file: Path | None = flag("Continue the chat in FILE, and save it there.", "--session", group=CHAT),
    template: TemplateFlags,
    sampling: SamplingFlags,
    model: ModelFlags,
    drafting: DraftFlags,
    adapting: AdapterFlags,
) -> None:
    """Talk with a model.

    Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. Without
    --max-new-tokens an answer may take what is left of the context. From a
    pipe, every line is a message or a command. With --session FILE the chat
    and what the model has computed of it are there again next time.
    """
    options = options_of(sampling) | adapting.first()
    model = with_source(model, source)
    lm = load_model(model, drafting, adapting)
    variables = template_variables(template, lm, model.model)
    session = ChatSession(lm, model.model, options, Conversation(), variables)
    if file is not None:
        session.keep_in(expanded(file))
    if system is not None:
        session.adopt(Conversation(system, session.conversation.turns))
    try:
        _converse_here(session, model.model)
    finally:
        session.keep()


def _converse_here(session: ChatSession, model: str) -> None:
    if is_terminal(sys.stdin) and is_terminal(sys.stdout):
        note(f"{model}, a context of {session.context:,} tokens. /help lists the commands, Ctrl-D leaves.")
        if turns := len(session.conversation.turns):
            note(f"going on after {count(turns, 'question')} and the answers:")
            note(recap(session.conversation, columns()))
        converse(session, TerminalInput(COMMANDS), on_terminal=True)
    elif not converse(session, PipedInput(), on_terminal=False):
        raise typer.Exit(2)


def converse(session: ChatSession, lines: ChatInput, *, on_terminal: bool) -> bool:
    """Take lines to their end; returns whether all could be served. An error is told, and the chat goes on."""
    all_served = True
    while True:
        try:
            line = lines.read()
            if line is None:
                return all_served
            if line.startswith("/") and not line.startswith("//"):
                reply = run_command(session, line)
                if reply is None:
                    return all_served
                if isinstance(reply, Retry):
                    _answer(session, session.retry, on_terminal)
                else:
                    write(f"{fitted(reply)}\n")
            elif line.strip():
                _answer(session, partial(session.ask, line.removeprefix("/")), on_terminal)
            session.keep()
        except OnwardError as error:
            report("error", str(error))
            all_served = False
        except KeyboardInterrupt:
            # A script that is interrupted should end; a person has other ways to leave.
            if not on_terminal:
                raise
            note("Ctrl-D or /exit leaves")


def _answer(session: ChatSession, ask: "Callable[[Callable[[Piece], None]], ChatAnswer]", on_terminal: bool) -> None:
    writer = TextWriter()
    try:
        answer = ask(AnswerWriter(writer).write)
    finally:
        # Also after an error in the midst of an answer, which is told on a line of its own.
        if not writer.at_line_start:
            write("\n")
    if answer.completion is None and not on_terminal:
        raise KeyboardInterrupt
    if remark := _remark(session, answer):
        note(remark)


class AnswerWriter:
    """Shows an answer as it comes. On a terminal reasoning is dim and without its marks; elsewhere text is as it is."""

    def __init__(self, writer: TextWriter) -> None:
        self._writer = writer
        self._thinks = False

    def write(self, piece: "Piece") -> None:
        delta = piece.message
        if delta is None or not self._writer.can_dim:
            self._writer.write(piece.text)
            return
        self._thinks = self._thinks or bool(delta.reasoning)
        self._writer.write(delta.reasoning, dim=True)
        if delta.content and self._thinks:
            self._writer.write("\n\n")
            self._thinks = False
        self._writer.write(delta.content)


def recap(conversation: Conversation, width: int) -> str:
    """The end of a conversation, a line or two for each message."""
    lines = []
    for asked, answered in conversation.turns[-_RECAP:]:
        lines += [shortened(f"> {asked}", width), shortened(answered, 2 * width - 20)]
    return "\n".join(lines)


def _remark(session: ChatSession, answer: ChatAnswer) -> str:
    """What should be known of an answer that did not end by itself."""
    if answer.completion is None:
        return "stopped; what is shown stays in the chat" if answer.text else "stopped; the message is not kept"
    if answer.completion.finish_reason != "length":
        if answer.same_as_before:
            return "the same answer again; /set temperature 0.8 lets others be drawn"
        return "" if answer.text else "the model ended its answer before it began"
    if not session.is_full(answer.completion):
        return f"cut at {count(len(answer.completion.token_ids), 'token')}, as max_new_tokens says"
    return f"cut: the context of {session.context:,} tokens is full. /reset begins a new chat"
