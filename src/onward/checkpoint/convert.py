"""Convert a checkpoint to a folder of safetensors in the Hugging Face layout, or to a GGUF file.

A conversion preserves the numbers exactly, or is refused.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.formats import methods_of
from onward.checkpoint.gguf import GgufCheckpoint, parts_of
from onward.checkpoint.gguf.export import export_family, model_metadata, model_tensors, texts_metadata, write_gguf
from onward.checkpoint.quantized_folder import (
    MANIFEST,
    copy_small_files,
    read_manifest,
    weights_by_stock_name,
    without_quantization,
    write_json,
    write_safetensors,
)
from onward.checkpoint.shards import WEIGHTS
from onward.checkpoint.source import Checkpoint, find_folder, open_checkpoint
from onward.checkpoint.stored_names import with_stacked_experts
from onward.checkpoint.weights import read_weights
from onward.errors import OptionError, RequestError, warn
from onward.models import Architecture, read_config
from onward.models.families import model_type
from onward.models.model import CPU
from onward.ops import QuantizedWeight
from onward.util.files import appears, check_destination

FORMATS = ("safetensors", "gguf")
_Weights = dict[str, Tensor | QuantizedWeight]


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    *,
    dtype: torch.dtype | None = None,
    show_downloads: bool = False,
) -> Path:
    """Convert a checkpoint.

    Args:
        source: a folder, a GGUF file, a hub id or "demo", as for `onward.load`.
        destination: a folder for "safetensors", absent or empty; an absent file "….gguf" for "gguf". It is written
            atomically.
        to: "safetensors", floats in the Hugging Face layout; or "gguf", for Llama and similar families (docs/gguf.md)
            with byte-level tokenizers: floats unchanged, int4 as Q4_0, iq4_nl as IQ4_NL.
        dtype: of the weights; by default each keeps its own. Dequantized weights are float32 by default, the only dtype
            that holds every scale times every integer.
        show_downloads: show progress bars while downloading.

    Returns:
        The destination.

    Raises:
        RequestError: an unknown format, a destination that exists or is not writable, or a model that the format
            cannot hold.
    """
    if to not in FORMATS:
        raise OptionError("to", f"must be {' or '.join(FORMATS)}; got {to!r}")
    target = Path(destination).expanduser().absolute()
    check_destination(target, is_file=to == "gguf")
    if to == "gguf":
        if target.suffix.lower() != ".gguf":
            raise RequestError(f"{target} must end with .gguf")
        if (parts := len(parts_of(target.name))) != 1:
            raise RequestError(f"{target} is the name of one of {parts} parts, but the file is whole: use another name")
    path = find_folder(source, progress=show_downloads)
    checkpoint = open_checkpoint(path)
    if to == "gguf" and isinstance(checkpoint, GgufCheckpoint):
        raise RequestError(f"{path} is already GGUF")
    config = read_config(checkpoint.config)
    if to == "safetensors":
        weights = _weights(checkpoint, config, dtype, packed=False)
        with appears(target) as partial:
            write_folder(checkpoint, weights, partial)
        return target
    assert isinstance(checkpoint, CheckpointFolder)
    family = export_family(checkpoint.config)
    fields = family.fields(checkpoint.config)
    metadata = model_metadata(family, fields, path.name) | texts_metadata(checkpoint, read_config(fields).vocab_size)
    weights = _weights(checkpoint, config, dtype, packed=True)
    with appears(target) as partial:
        write_gguf(partial, metadata, model_tensors(family, fields, weights))
        if read_config(_as_float32(GgufCheckpoint(partial).config)) != read_config(_as_float32(fields)):
            raise RequestError(
                f"{path}: GGUF metadata cannot express its config.json, such as a window or RoPE schedule"
            )
    return target


def _weights(checkpoint: Checkpoint, config: Architecture, dtype: torch.dtype | None, packed: bool) -> _Weights:
    """The weights by stock name, as floats; if `packed` and without a dtype, quantized weights stay quantized."""
    if isinstance(checkpoint, GgufCheckpoint):
        blocks = set(checkpoint.types) - {"F32", "F16", "BF16"}
        # With float32, blocks are dequantized; other dtypes are rounded from it.
        read_dtype = torch.float32 if blocks else dtype
        params = checkpoint.read_weights(config, dtype=read_dtype, device=CPU, exact=dtype is None)
    else:
        manifest = read_manifest(checkpoint.path, checkpoint.config)
        if manifest is not None:
            read_dtype, dtype = None, dtype if packed else dtype or torch.float32
        else:
            read_dtype = dtype or (torch.float32 if methods_of(checkpoint.config) is not None else None)
            dtype = None
        path = checkpoint.path
        params = read_weights(path, config, dtype=read_dtype, device=CPU, manifest=manifest, own_dtypes=True)
    named = weights_by_stock_name(config, params)
    if dtype is None:
        return named
    return {
        name: weight.to(dtype=dtype).dequantize() if isinstance(weight, QuantizedWeight) else weight.to(dtype)
        for name, weight in named.items()
    }


def write_folder(checkpoint: Checkpoint, weights: Mapping[str, Any], folder: Path) -> None:
    """Write float weights by stock name as a folder in the Hugging Face layout, with the checkpoint's other files."""
    folder.mkdir()
    matrix = next(weight for weight in weights.values() if weight.dim() > 1)
    omitted = (MANIFEST, "torch_dtype")
    config = without_quantization(checkpoint.config)
    config = {name: value for name, value in config.items() if name not in omitted}
    config["dtype"] = str(matrix.dtype).removeprefix("torch.")
    if isinstance(checkpoint, GgufCheckpoint):
        config["model_type"] = model_type(config["architectures"][0])
        _write_gguf_texts(checkpoint, folder)
    else:
        copy_small_files(checkpoint.path, folder)
    write_json(folder / "config.json", config)
    write_safetensors(with_stacked_experts(weights, config["architectures"][0]), folder / WEIGHTS)


def _write_gguf_texts(checkpoint: GgufCheckpoint, folder: Path) -> None:
    eos = {"eos_token_id": list(checkpoint.eos)} if checkpoint.eos else {}
    if generation := checkpoint.generation_config | eos:
        write_json(folder / "generation_config.json", generation)
    if checkpoint.tokenizer is None:
        return
    if others := checkpoint.tokenizer.decoded_otherwise:
        warn(
            f"tokenizer.json cannot express the texts of {len(others)} tokens of {checkpoint.path}, such as id "
            f"{others[0]}: these decode to other text, with the same ids"
        )
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer.to_json(), encoding="utf-8")
    write_json(folder / "tokenizer_config.json", checkpoint.tokenizer_config)
    if checkpoint.chat_template is not None:
        source, *tools = checkpoint.chat_template.sources
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        if tools:
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tools[0], encoding="utf-8")


def _as_float32(value: Any) -> Any:
    """A JSON value with its floats rounded to float32, as in GGUF metadata."""
    if isinstance(value, dict):
        return {name: _as_float32(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_float32(item) for item in value]
    return float(np.float32(value)) if isinstance(value, float) else value
