"""`onward convert` and `onward quantize`: write a checkpoint in another format, or with fewer bits."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli.flags import DTYPES, QUANTIZATION, flag
from onward.cli.inputs import expanded, expanded_source, starting
from onward.cli.terminal import is_terminal, waiting
from onward.errors import RequestError
from onward.util.options import OUTPUT

if TYPE_CHECKING:
    from onward.quantization import TensorReport


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Model folder, GGUF file, hub id or demo.")],
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="New folder or .gguf file.")],
    *,
    to: str = flag("safetensors or gguf. [required]", group=OUTPUT, default=..., choices=("safetensors", "gguf")),
    dtype: str | None = flag(
        "bfloat16, float16 or float32.", group=OUTPUT, choices=DTYPES, show_default="as in SOURCE"
    ),
) -> None:
    """Convert a checkpoint to safetensors or GGUF.

    A conversion that would not be exact is refused. safetensors files contain
    floats: quantized weights become float32, unless you set --dtype. GGUF
    files contain floats, int4 (as Q4_0) or iq4_nl, for these families: Llama,
    Mistral, Mixtral, Qwen, Phi-3, OLMo, EXAONE, Granite, SmolLM3 and Seed-OSS
    with byte-level tokenizers.
    """
    if dtype not in (None, *DTYPES):
        raise RequestError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    with starting():
        import torch

        from onward.checkpoint.convert import convert as convert_checkpoint
    with waiting(f"converting {source} …"):
        output = convert_checkpoint(
            expanded_source(source),
            expanded(destination),
            to,
            dtype=None if dtype is None else getattr(torch, dtype),
            show_downloads=is_terminal(sys.stderr),
        )
    size = sum(file.stat().st_size for file in (output, *output.rglob("*")) if file.is_file())
    typer.echo(f"{size / 1e6:,.1f} MB in {to}: {destination}")


def quantize(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Model folder, hub id or demo.")],
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="New or empty folder.")],
    *,
    format: str | None = flag(
        "int8, int4 or iq4_nl.", group=QUANTIZATION, choices=("int8", "int4", "iq4_nl"), show_default="int8"
    ),
    bits: float | None = flag("Mix int8 and iq4_nl to at most X bits per weight.", group=QUANTIZATION),
    calibrate: bool = flag("Reduce output errors with GPTQ; takes minutes.", group=QUANTIZATION, default=False),
    seed: int | None = flag("Random seed of the calibration texts.", group=QUANTIZATION, low=0, show_default="0"),
) -> None:
    """Quantize a checkpoint to 8 or 4 bits.

    All commands accept the new folder as a model. For each matrix, the bits
    per weight and the relative root mean square error are printed.

    int8 takes about 8 bits per weight; int4 and iq4_nl take 4.5. iq4_nl, whose
    levels are denser near 0, is more accurate; int4 is slightly faster.

    --calibrate generates texts with the model and rounds the weights to
    minimize the output errors on them (GPTQ). The output errors are printed,
    too; the weight errors increase.

    --bits measures how much each matrix matters: the divergence of the model
    (in nats per token) with only that matrix in iq4_nl. Matrices with the
    highest cost for their size get int8, up to X bits per weight on average.
    """
    if format is not None and bits is not None:
        raise RequestError("--bits chooses the format of each matrix: leave out --format")
    if seed is not None and not calibrate:
        raise RequestError("--seed needs --calibrate: add it, or leave out --seed")
    with starting():
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
    sizes = f"{len(reports)} matrices, {size / 1e6:,.1f} MB in {formats}, {bits:.2f} bits per weight"
    typer.echo(f"{sizes}: {destination}")
    nearest = sum(report.relative_output_error is None for report in reports)
    if calibrate and nearest:
        typer.echo(f"{nearest} of them were rounded to nearest: embedding tables, and experts that saw too few tokens")


def _show(report: "TensorReport") -> None:
    of_outputs = "" if report.relative_output_error is None else f"{report.relative_output_error:.4%} of outputs"
    cost = "" if report.divergence is None else f"{report.divergence:.2e} nats"
    columns = f"{report.bits:5.2f} bits", f"{report.relative_rms_error:8.4%}", of_outputs, cost, report.name
    typer.echo("  ".join(column for column in columns if column))
