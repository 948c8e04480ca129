"""`onward convert`: a checkpoint into a folder of safetensors or a GGUF file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from onward.cli.prompt import expanded, expanded_source
from onward.cli.terminal import is_terminal, waiting
from onward.errors import RequestError

_DTYPES = ("bfloat16", "float16", "float32")


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, a GGUF file, a hub id, or 'demo'.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="A folder or a .gguf file that is absent.")
    ],
    *,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="safetensors or gguf.", show_default=False)],
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help=f"Of the weights: {', '.join(_DTYPES)}.")
    ] = None,
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
