"""`onward quantize`: a checkpoint into a folder of 8 or 4 bits."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli.prompt import expanded, expanded_source
from onward.cli.terminal import is_terminal, waiting

if TYPE_CHECKING:
    from onward.quantization import TensorReport


def quantize(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, a hub id, or the bundled 'demo'.")],
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="A folder that is absent or empty.")],
    *,
    format: Annotated[str, typer.Option("--format", metavar="NAME", help="int8 or int4.")] = "int8",
) -> None:
    """Write a checkpoint's weights in 8 or 4 bits.

    Every command takes the folder as --model. Printed is each matrix with
    its error: the root mean square of the change, relative to the weights'.
    """
    with waiting("starting …"):
        from onward.quantization import quantize_folder

    with waiting(f"quantizing {source} …"):
        reports = quantize_folder(
            expanded_source(source),
            expanded(destination),
            format,
            progress=_show,
            show_downloads=is_terminal(sys.stderr),
        )
    size = sum(report.nbytes for report in reports)
    typer.echo(f"{len(reports)} matrices, {size / 1e6:,.1f} MB in {format}: {destination}")


def _show(report: "TensorReport") -> None:
    typer.echo(f"{report.relative_rms_error:8.4%}  {report.name}")
