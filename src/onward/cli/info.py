"""`onward info`: the machine, and what a checkpoint would take of it."""

import json
import shutil
import sys
from typing import Annotated

import typer

from onward.cli.facts import as_lines, as_object
from onward.cli.holdings import Holdings
from onward.cli.loading import find
from onward.cli.machine import kernel_facts, machine_facts, software_facts
from onward.cli.terminal import is_terminal, waiting
from onward.errors import RequestError


def info(
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="A folder, a hub id, or the bundled 'demo'.")
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="SOURCE", help="The same as SOURCE, as elsewhere.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", metavar="N", help="Memory for N positions; else the model's context.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="B", help="Memory for B texts at once.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the machine and, of a SOURCE, what the checkpoint holds.

    Memory is that of weights and cache. The weights are not loaded; those of
    a hub id are downloaded if they are not there yet.
    """
    if source is not None and model is not None:
        raise RequestError(f"the model is named twice, {source!r} and --model {model}: give one")
    source = model if source is None else source
    if source is None and (context is not None or batch != 1):
        raise RequestError("--context and --batch ask for the memory of a model: name its SOURCE too")
    with waiting("looking …"):
        sections = {"machine": machine_facts(), "kernels": kernel_facts(), "software": software_facts()}
    if source is not None:
        folder = find(source)
        with waiting(f"looking at {source} …"):
            holdings = Holdings(folder)
            sections["checkpoint"] = holdings.checkpoint_facts()
        sections["memory"] = holdings.memory_facts(context, batch)
    if as_json:
        typer.echo(json.dumps(as_object(sections), ensure_ascii=False).encode())
        return
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    for line in as_lines(sections, width):
        typer.echo(line if line.startswith(" ") else typer.style(line, bold=True))
