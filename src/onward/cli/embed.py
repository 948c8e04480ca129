"""`onward embed`: embeddings of the texts in a file of JSON lines."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.flags import INPUT, AppliedAdapterFlags, ModelFlags, flag
from onward.cli.inputs import expanded, load_model
from onward.cli.terminal import note
from onward.errors import RequestError
from onward.util.options import OUTPUT
from onward.util.text import brief
from onward.util.text_input import LONGEST_LINE, TextError, parse_request_json, read_lines

# Texts of similar length among so many run together.
_GROUP = 1024


def embed(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines; '-' reads standard input.")],
    *,
    output: Path | None = flag("Write to FILE instead of standard output.", "-o", group=OUTPUT),
    dimensions: int | None = flag("Keep the first N dimensions.", group=OUTPUT, show_default="all", low=1),
    normalize: bool = flag(
        "Divide embeddings by their length.", "--normalize/--no-normalize", group=OUTPUT, default=True
    ),
    prompt: str | None = flag("Put TEXT before each text.", group=INPUT),
    prompt_name: str | None = flag("Put the checkpoint's prompt of this name before each text.", group=INPUT),
    model: ModelFlags,
    adapting: AppliedAdapterFlags,
) -> None:
    """Compute the embeddings of texts.

    Each line is a text as a JSON string, or an object with a "text". It is
    written as an object with an "embedding", a list of numbers, and with the
    other fields of the line.
    """
    lm = load_model(model, adapting=adapting)
    options: dict[str, Any] = {
        "dimensions": dimensions,
        "normalize": normalize,
        "prompt": prompt,
        "prompt_name": prompt_name,
        "adapter": adapting.first().get("adapter"),
    }
    done = 0
    with ExitStack() as stack:
        try:
            source = sys.stdin.buffer if str(file) == "-" else stack.enter_context(expanded(file).open("rb"))
            out = sys.stdout if output is None else stack.enter_context(expanded(output).open("w", encoding="utf-8"))
        except OSError as error:
            raise RequestError(f"{error.filename!r} cannot be opened: {error.strerror or error}") from error
        for group in _groups(read_lines(source)):
            embeddings = lm.embed([line["text"] for line in group], **options)
            for line, embedding in zip(group, embeddings.tolist(), strict=True):
                out.write(json.dumps(line | {"embedding": embedding}, ensure_ascii=False) + "\n")
            done += len(group)
    if output is not None:
        note(f"{done} embeddings in {output}")


def _groups(lines: Iterator[bytes]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        group.append(_parsed(number, line))
        if len(group) == _GROUP:
            yield group
            group = []
    if group:
        yield group


def _parsed(number: int, line: bytes) -> dict[str, Any]:
    if len(line) > LONGEST_LINE:
        raise RequestError(f"line {number} has more than {LONGEST_LINE:,} bytes: split the text")
    try:
        value = parse_request_json(line)
    except TextError as error:
        raise RequestError(f"line {number} is not JSON: {error}") from error
    fields = {"text": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        raise RequestError(f'line {number} must be a string, or an object with a "text"; got {brief(value)}')
    return fields
