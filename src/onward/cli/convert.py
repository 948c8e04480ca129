"""`onward convert` and `onward quantize`: a checkpoint in another format, or in 8 or 4 bits."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli.flags import flag
from onward.cli.inputs import expanded, expanded_source
from onward.cli.terminal import is_terminal, waiting
from onward.errors import RequestError

if TYPE_CHECKING:
    from onward.quantization import TensorReport

_DTYPES = ("bfloat16", "float16", "float32")


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, a GGUF file, a hub id, or 'demo'.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="A folder or a .gguf file that is absent.")
    ],
    *,
    to: str = flag("safetensors or gguf.", default=..., metavar="FORMAT", show_default=False),
    dtype: str | None = flag(f"Of the weights: {', '.join(_DTYPES)}.", metavar="NAME"),
) -> None:
    """Convert a checkpoint to safetensors or GGUF.

    What is written stands for the same numbers, or it is refused. safetensors
    are floats: quantized weights become float32, unless --dtype is given.
    GGUF holds floats, int4 (as Q4_0) and iq4_nl, of Llama, Mistral, Mixtral, Qwen,
    Phi-3, OLMo, EXAONE, Granite, SmolLM3 and Seed-OSS with byte-level tokenizers.
    """
    if dtype not in (None, *_DTYPES):
        raise RequestError(f"--dtype is one of {', '.join(_DTYPES)}; got {dtype!r}")
    with waiting("starting …"):
        import torch

        from onward.checkpoint.convert import convert as convert_checkpoint
    with waiting(f"converting {source} …"):
        written = convert_checkpoint(
            expanded_source(source),
            expanded(destination),
            to,
            dtype=None if dtype is None else getattr(torch, dtype),
            show_downloads=is_terminal(sys.stderr),
        )
    files = [written] if written.is_file() else [file for file in written.rglob("*") if file.is_file()]
    typer.echo(f"{sum(file.stat().st_size for file in files) / 1e6:,.1f} MB in {to}: {destination}")


def quantize(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, a hub id, or the bundled 'demo'.")],
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="A folder that is absent or empty.")],
    *,
    format: str | None = flag("int8 (the default), int4 or iq4_nl.", metavar="NAME", show_default=False),
    bits: float | None = flag("At most X bits a weight: int8 where it gains most."),
    calibrate: bool = flag("Fewer errors in as many bytes, in minutes: see above.", default=False),
    seed: int | None = flag("Seed of the texts of --calibrate; 0 by default.", min=0),
) -> None:
    """Write a checkpoint's weights in 8 or 4 bits.

    Every command takes the folder as --model. Printed is each matrix with its
    bits and its error: the root mean square of the change, relative to the
    weights'.

    With --calibrate the model first writes texts, and the weights are rounded
    for small errors on these (GPTQ). There is then the error of each matrix's
    outputs on them, too, and that of the weights becomes larger.

    int4 and iq4_nl take 4.5 bits. iq4_nl, whose numbers are denser near 0,
    errs less; int4 is a little faster.

    With --bits, what each matrix costs in iq4_nl is measured: the divergence
    of the model from what it was, in nats a token. Those that cost most for
    their size get int8, as far as the bits go.
    """
    if format is not None and bits is not None:
        raise RequestError("--bits chooses among the formats itself: leave out --format")
    if seed is not None and not calibrate:
        raise RequestError("--seed is that of the texts of --calibrate: give that too, or leave out --seed")
    with waiting("starting …"):
        from onward.language_model import Calibration, quantize_folder

    with waiting(f"quantizing {source} …") as show:
        reports = quantize_folder(
            expanded_source(source),
            expanded(destination),
            (format or "int8") if bits is None else bits,
            progress=_show,
            show_downloads=is_terminal(sys.stderr),
            show_fraction=show,
            calibrate=Calibration(seed=seed or 0) if calibrate else None,
        )
    size = sum(report.nbytes for report in reports)
    bits = 8 * size / sum(rows * inputs for rows, inputs in (report.shape for report in reports))
    formats = " and ".join(sorted({report.format for report in reports}))
    sizes = f"{len(reports)} matrices, {size / 1e6:,.1f} MB in {formats}, {bits:.2f} bits a weight"
    typer.echo(f"{sizes}: {destination}")
    nearest = sum(report.relative_output_error is None for report in reports)
    if calibrate and nearest:
        typer.echo(f"{nearest} of them rounded to nearest: tables of their own, and experts that got too few tokens")


def _show(report: "TensorReport") -> None:
    of_outputs = "" if report.relative_output_error is None else f"{report.relative_output_error:.4%} of outputs"
    cost = "" if report.divergence is None else f"{report.divergence:.2e} nats"
    columns = f"{report.bits:5.2f} bits", f"{report.relative_rms_error:8.4%}", of_outputs, cost, report.name
    typer.echo("  ".join(column for column in columns if column))
