"""`onward generate`: one prompt in, its continuation out."""

import dataclasses
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli.flags import ModelFlags, SamplingFlags
from onward.cli.loading import load_model
from onward.cli.prompt import parse_ids, read_prompt
from onward.cli.streaming import follow, summary
from onward.cli.terminal import end_line, is_terminal, note, waiting, write
from onward.errors import OnwardError, RequestError

if TYPE_CHECKING:
    from onward import Completion, Piece


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; '-' or none reads standard input.")
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from FILE.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message of a chat.")] = False,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The system message of that chat.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is token ids, and so is what is printed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: text, ids, seed, timing, …")] = False,
    sampling: SamplingFlags,
    model: ModelFlags,
) -> None:
    """Continue a prompt, and print the text as it comes.

    The prompt is the argument, a file or standard input; one newline at the
    end of the latter two is dropped. Into a pipe goes the text and nothing
    else. Options not given are the model's own.
    """
    if system is not None and not chat:
        raise RequestError("--system is the system message of a chat: add --chat")
    if chat and ids:
        raise RequestError("--chat writes a text around the prompt, --ids takes it as ids: give one of them")
    text = read_prompt(prompt, file)
    given = parse_ids(text) if ids else text
    options = sampling.options()
    lm = load_model(model)
    start = lm.chat_prompt(_messages(text, system)) if chat else given
    if as_json:
        with waiting("generating …"):
            completion = lm.generate(start, **options)
        assert not isinstance(completion, list)
        # Bytes, for JSON is UTF-8 whatever the terminal's encoding.
        typer.echo(json.dumps(dataclasses.asdict(completion), ensure_ascii=False).encode())
    else:
        _print_text(lm.stream(start, **options), as_ids=ids or lm.tokenizer is None)


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _print_text(stream: "Generator[Piece, None, Completion]", *, as_ids: bool) -> None:
    shown: list[str] = []

    def emit(piece: "Piece") -> None:
        text = f"{' ' if shown else ''}{piece.token_id}" if as_ids else piece.text
        shown.append(text)
        write(text)

    try:
        completion = follow(stream, emit)
    except OnwardError:
        end_line("".join(shown))
        raise
    end_line("".join(shown))
    if is_terminal(sys.stdout) and is_terminal(sys.stderr):
        note(summary(completion))
