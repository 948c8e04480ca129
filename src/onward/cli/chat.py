"""`onward chat`: chat on a terminal, or line by line through a pipe."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from onward.cli.chat_session import ChatAnswer, ChatSession, Conversation
from onward.cli.flags import (
    CHAT,
    AppliedAdapterFlags,
    DraftFlags,
    ModelFlags,
    SourceArgument,
    TemplateFlags,
    flag,
    with_source,
)
from onward.cli.inputs import expanded, generate_options, load_model, template_variables
from onward.cli.option_flags import SamplingFlags
from onward.cli.repl import Retry, piped_input, run_command, terminal_input
from onward.cli.terminal import TextWriter, columns, count, fitted, is_terminal, note, report, shortened, write
from onward.errors import OnwardError

if TYPE_CHECKING:
    from onward.language_model import Piece

_RECAP_TURNS = 2


def chat(
    source: SourceArgument = None,
    *,
    system: str | None = flag("System message.", group=CHAT),
    file: Path | None = flag("Resume the chat in FILE, and save it there.", "--session", group=CHAT),
    template: TemplateFlags,
    sampling: SamplingFlags,
    model: ModelFlags,
    drafting: DraftFlags,
    adapting: AppliedAdapterFlags,
) -> None:
    """Chat with a model.

    Ctrl-C stops an answer, Ctrl-D quits, /help lists the commands. Without
    --max-new-tokens, an answer may fill the rest of the context. In a pipe,
    each line is a message or a command.

    --session FILE saves the chat and its KV cache, and resumes both next
    time.
    """
    options = generate_options(sampling) | adapting.first()
    model = with_source(model, source)
    lm = load_model(model, drafting, adapting)
    variables = template_variables(template, lm, model.model)
    session = ChatSession(lm, model.model, options, Conversation(), variables)
    if file is not None:
        session.open(expanded(file))
    if system is not None:
        session.set_conversation(Conversation(system, session.conversation.turns))
    try:
        if is_terminal(sys.stdin) and is_terminal(sys.stdout):
            note(f"{model.model}, a context of {session.context:,} tokens. /help lists the commands, Ctrl-D quits.")
            if turns := len(session.conversation.turns):
                note(f"resuming after {count(turns, 'question')} and the answers:")
                note(recap(session.conversation, columns()))
            converse(session, terminal_input(), on_terminal=True)
        elif not converse(session, piped_input(), on_terminal=False):
            raise typer.Exit(2)
    finally:
        session.save()


def converse(session: ChatSession, read: "Callable[[], str | None]", *, on_terminal: bool) -> bool:
    """Run a chat until its input ends, and return whether it had no errors; an error does not end it."""
    succeeded = True
    while True:
        try:
            line = read()
            if line is None:
                return succeeded
            if line.startswith("/") and not line.startswith("//"):
                reply = run_command(session, line)
                if reply is None:
                    return succeeded
                if isinstance(reply, Retry):
                    _answer(session, session.retry, on_terminal)
                else:
                    write(f"{fitted(reply)}\n")
            elif line.strip():
                _answer(session, partial(session.ask, line.removeprefix("/")), on_terminal)
            session.save()
        except OnwardError as error:
            report("error", str(error))
            succeeded = False
        except KeyboardInterrupt:
            # An interrupt ends a script, but not an interactive chat.
            if not on_terminal:
                raise
            note("Ctrl-D or /exit quits")


def _answer(session: ChatSession, ask: "Callable[[Callable[[Piece], None]], ChatAnswer]", on_terminal: bool) -> None:
    writer = TextWriter()
    try:
        answer = ask(AnswerWriter(writer).write)
    finally:
        if not writer.at_line_start:
            write("\n")
    if answer.completion is None and not on_terminal:
        raise KeyboardInterrupt
    if remark := _remark(session, answer):
        note(remark)


class AnswerWriter:
    """Print an answer as it streams. On a terminal, reasoning is dim and without its marks."""

    def __init__(self, writer: TextWriter) -> None:
        self._writer = writer
        self._is_reasoning = False

    def write(self, piece: "Piece") -> None:
        delta = piece.message
        if delta is None or not self._writer.can_dim:
            self._writer.write(piece.text)
            return
        self._is_reasoning |= bool(delta.reasoning)
        self._writer.write(delta.reasoning, dim=True)
        if delta.content and self._is_reasoning:
            self._writer.write("\n\n")
            self._is_reasoning = False
        self._writer.write(delta.content)


def recap(conversation: Conversation, width: int) -> str:
    """Return the last turns of a conversation, with one or two lines per message."""
    lines = []
    for question, answer in conversation.turns[-_RECAP_TURNS:]:
        lines += [shortened(f"> {question}", width), shortened(answer, 2 * width - 20)]
    return "\n".join(lines)


def _remark(session: ChatSession, answer: ChatAnswer) -> str:
    """Return a note on an answer that is incomplete, empty or repeated; else an empty string."""
    completion = answer.completion
    if completion is None:
        return "stopped; the text so far stays in the chat" if answer.text else "stopped; the message is not kept"
    if completion.finish_reason != "length":
        if answer.same_as_before:
            return "the same answer again; /set temperature 0.8 to sample others"
        return "" if answer.text else "the model's answer is empty"
    if completion.prompt_tokens + len(completion.token_ids) < session.context:
        return f"cut at {count(len(completion.token_ids), 'token')} by max_new_tokens"
    return f"cut: the context of {session.context:,} tokens is full. /reset begins a new chat"
