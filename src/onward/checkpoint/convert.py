"""Convert a checkpoint to a folder of safetensors in the Hugging Face layout, or to a GGUF file.

A conversion preserves the numbers exactly, or is refused.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onward.checkpoint import quantized_folder
from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.formats import methods_of
from onward.checkpoint.gguf import GgufCheckpoint, parts_of
from onward.checkpoint.gguf.export import export_family, model_metadata, model_tensors, write_gguf
from onward.checkpoint.gguf.export_tokenizer import texts_metadata
from onward.checkpoint.shards import WEIGHTS
from onward.checkpoint.source import Checkpoint, find_folder, open_checkpoint
from onward.checkpoint.stacked_experts import with_stacked_experts
from onward.checkpoint.weights import read_weights
from onward.errors import OptionError, RequestError, warn
from onward.models import Architecture, read_config
from onward.ops import QuantizedWeight
from onward.util.files import appears, check_destination

FORMATS = ("safetensors", "gguf")
_CPU = torch.device("cpu")
# transformers' model types that are not just the architecture in lowercase.
_MODEL_TYPES = """
DeepseekV2=deepseek_v2 DeepseekV3=deepseek_v3 FalconH1=falcon_h1 Gemma3=gemma3_text Gemma4=gemma4_text Glm4Moe=glm4_moe
GptOss=gpt_oss NemotronH=nemotron_h Qwen3Moe=qwen3_moe Qwen3_5=qwen3_5_text Qwen3_5Moe=qwen3_5_moe_text SeedOss=seed_oss
"""
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
    path = find_folder(source if isinstance(source, str) else Path(source), progress=show_downloads)
    checkpoint = open_checkpoint(path)
    if to == "gguf" and isinstance(checkpoint, GgufCheckpoint):
        raise RequestError(f"{path} is already GGUF")
    config = read_config(checkpoint.config)
    if to == "safetensors":
        weights = _weights(checkpoint, config, dtype, packed=False)
        with appears(target) as partial:
            _write_folder(checkpoint, weights, partial)
        return target
    assert isinstance(checkpoint, CheckpointFolder)
    family = export_family(checkpoint.config)
    fields = family.fields(checkpoint.config)
    metadata = model_metadata(family, fields, path.name) | texts_metadata(checkpoint, read_config(fields).vocab_size)
    weights = _weights(checkpoint, config, dtype, packed=True)
    with appears(target) as partial:
        write_gguf(partial, metadata, model_tensors(family, fields, weights))
        _check_written(partial, fields, path)
    return target


def _weights(checkpoint: Checkpoint, config: Architecture, dtype: torch.dtype | None, packed: bool) -> _Weights:
    """The weights by stock name, as floats; if `packed` and without a dtype, quantized weights stay quantized."""
    if isinstance(checkpoint, GgufCheckpoint):
        blocks = set(checkpoint.types) - {"F32", "F16", "BF16"}
        # With float32, blocks are dequantized; other dtypes are rounded from it.
        read_dtype = torch.float32 if blocks else dtype
        params = checkpoint.read_weights(config, dtype=read_dtype, device=_CPU, exact=dtype is None)
    elif (manifest := quantized_folder.read_manifest(checkpoint.path, checkpoint.config)) is not None:
        params = quantized_folder.read_quantized(checkpoint.path, manifest, config, dtype=None, device=_CPU)
        dtype = dtype if packed else dtype or torch.float32
    else:
        if dtype is None and methods_of(checkpoint.config) is not None:
            dtype = torch.float32
        params = read_weights(checkpoint.path, config, dtype=dtype, device=_CPU, own_dtypes=True)
        return quantized_folder.weights_by_stock_name(config, params)
    named = quantized_folder.weights_by_stock_name(config, params)
    return named if dtype is None else {name: _as_float(weight, dtype) for name, weight in named.items()}


def _as_float(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype=dtype).dequantize() if isinstance(weight, QuantizedWeight) else weight.to(dtype)


def _write_folder(checkpoint: Checkpoint, weights: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir()
    matrix = next(weight for weight in weights.values() if weight.dim() > 1)
    omitted = (quantized_folder.MANIFEST, "torch_dtype")
    config = quantized_folder.without_quantization(checkpoint.config)
    config = {name: value for name, value in config.items() if name not in omitted}
    config["dtype"] = str(matrix.dtype).removeprefix("torch.")
    if isinstance(checkpoint, GgufCheckpoint):
        name = config["architectures"][0].removesuffix("ForCausalLM")
        config["model_type"] = dict(pair.split("=") for pair in _MODEL_TYPES.split()).get(name, name.lower())
        _write_gguf_texts(checkpoint, folder)
    else:
        quantized_folder.copy_small_files(checkpoint.path, folder)
    _write_json(folder / "config.json", config)
    quantized_folder.write_safetensors(with_stacked_experts(weights, config["architectures"][0]), folder / WEIGHTS)


def _write_gguf_texts(checkpoint: GgufCheckpoint, folder: Path) -> None:
    eos = {"eos_token_id": list(checkpoint.eos)} if checkpoint.eos else {}
    if generation := checkpoint.generation_config | eos:
        _write_json(folder / "generation_config.json", generation)
    if checkpoint.tokenizer is None:
        return
    if others := checkpoint.tokenizer.decoded_otherwise:
        warn(
            f"tokenizer.json cannot express the texts of {len(others)} tokens of {checkpoint.path}, such as id "
            f"{others[0]}: these decode to other text, with the same ids"
        )
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer.to_json(), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", checkpoint.tokenizer_config)
    if checkpoint.chat_template is not None:
        source, *tools = checkpoint.chat_template.sources
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        if tools:
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tools[0], encoding="utf-8")


def _check_written(file: Path, fields: Mapping[str, Any], source: Path) -> None:
    """Raise unless the GGUF file describes the same architecture as these fields of the source's config.json."""
    if read_config(_as_float32(GgufCheckpoint(file).config)) != read_config(_as_float32(fields)):
        raise RequestError(f"{source}: GGUF metadata cannot express its config.json, such as a window or RoPE schedule")


def _as_float32(value: Any) -> Any:
    """A JSON value with its floats rounded to float32, as in GGUF metadata."""
    if isinstance(value, dict):
        return {name: _as_float32(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_float32(item) for item in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
