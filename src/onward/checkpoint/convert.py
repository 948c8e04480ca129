"""Convert a checkpoint: into a folder of safetensors in the Hugging Face layout, or into a GGUF file.

What is written stands for the same numbers, or the conversion is refused.
"""

import json
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
from onward.checkpoint.gguf.export import export_family, model_metadata, model_tensors, write_gguf
from onward.checkpoint.gguf.export_tokenizer import texts_metadata
from onward.checkpoint.quantized_folder import (
    MANIFEST,
    copy_small_files,
    read_manifest,
    read_quantized,
    weights_by_stock_name,
    without_methods,
    write_safetensors,
)
from onward.checkpoint.shards import WEIGHTS
from onward.checkpoint.source import Checkpoint, find_folder, open_checkpoint
from onward.checkpoint.stacked_experts import with_stacked_experts
from onward.checkpoint.weights import read_weights
from onward.errors import RequestError, warn
from onward.models import Architecture, read_config
from onward.ops import QuantizedWeight
from onward.util.files import appears, check_destination

FORMATS = ("safetensors", "gguf")
_CPU = torch.device("cpu")
# transformers' names of configs that are not those of their architectures in small letters.
_MODEL_TYPES = {
    "DeepseekV2": "deepseek_v2",
    "DeepseekV3": "deepseek_v3",
    "FalconH1": "falcon_h1",
    "Gemma3": "gemma3_text",
    "Gemma4": "gemma4_text",
    "Glm4Moe": "glm4_moe",
    "GptOss": "gpt_oss",
    "NemotronH": "nemotron_h",
    "Qwen3Moe": "qwen3_moe",
    "Qwen3_5": "qwen3_5_text",
    "Qwen3_5Moe": "qwen3_5_moe_text",
    "SeedOss": "seed_oss",
}
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
        destination: absent. For "safetensors" a folder, which may be empty; for "gguf" a file "….gguf". It appears
            when all is written, or not at all.
        to: "safetensors", floats in the Hugging Face layout; or "gguf", for Llama and families like it (docs/gguf.md)
            with byte-level tokenizers: floats as they are, int4 as Q4_0, iq4_nl as IQ4_NL.
        dtype: of the weights; by default each keeps one that holds it. Where they are quantized and are to be floats,
            that is float32, which alone holds every scale times every integer.
        show_downloads: show bars while a hub id is fetched.

    Returns:
        The destination.

    Raises:
        RequestError: another format, a destination that is taken or cannot be written, or a model that the format does
            not hold.
    """
    if to not in FORMATS:
        raise RequestError(f"a checkpoint is converted to {' or '.join(FORMATS)}; got {to!r}")
    target = Path(destination).expanduser().absolute()
    check_destination(target, is_file=to == "gguf")
    if to == "gguf":
        _check_name(target)
    path = find_folder(source if isinstance(source, str) else Path(source), progress=show_downloads)
    checkpoint = open_checkpoint(path)
    if to == "gguf" and isinstance(checkpoint, GgufCheckpoint):
        raise RequestError(f"{path} is GGUF already")
    config = read_config(checkpoint.config)
    if to == "gguf":
        assert isinstance(checkpoint, CheckpointFolder)
        line = export_family(checkpoint.config)
        fields = line.fields(checkpoint.config)
        metadata = model_metadata(line, fields, path.name) | texts_metadata(checkpoint, read_config(fields).vocab_size)
        weights = _weights(checkpoint, config, dtype, packed=True)
        with appears(target) as partial:
            write_gguf(partial, metadata, model_tensors(line, fields, weights))
            _check_written(partial, fields, path)
        return target
    weights = _weights(checkpoint, config, dtype, packed=False)
    with appears(target) as partial:
        _write_folder(checkpoint, weights, partial)
    return target


def _check_name(target: Path) -> None:
    """Raise unless a GGUF file is known as one by this name."""
    if target.suffix.lower() != ".gguf":
        raise RequestError(f"{target} must end with .gguf, by which a GGUF file is known")
    if (parts := len(parts_of(target.name))) != 1:
        raise RequestError(
            f"{target} is the name of one of {parts} parts, and the file will be whole: give another name"
        )


def _weights(checkpoint: Checkpoint, config: Architecture, dtype: torch.dtype | None, packed: bool) -> _Weights:
    """The weights by stock name, as floats; where `packed` and no dtype is given, quantized ones as they are."""
    if isinstance(checkpoint, GgufCheckpoint):
        blocks = set(checkpoint.types) - {"F32", "F16", "BF16"}
        # float32 is the dtype in which a GGUF's blocks are not kept in their own bits; other floats are cut from it.
        params = checkpoint.read_weights(
            config, dtype=torch.float32 if blocks else dtype, device=_CPU, exact=dtype is None
        )
        named = weights_by_stock_name(config, params)
        return {name: _as_float(weight, dtype) for name, weight in named.items()}
    manifest = read_manifest(checkpoint.path, checkpoint.config)
    if manifest is not None:
        params = read_quantized(checkpoint.path, manifest, config, dtype=None, device=_CPU)
        named = weights_by_stock_name(config, params)
        if packed and dtype is None:
            return named
        return {name: _as_float(weight, dtype or torch.float32) for name, weight in named.items()}
    if dtype is None and methods_of(checkpoint.config) is not None:
        dtype = torch.float32
    return weights_by_stock_name(
        config, read_weights(checkpoint.path, config, dtype=dtype, device=_CPU, own_dtypes=True)
    )


def _as_float(weight: Tensor | QuantizedWeight, dtype: torch.dtype | None) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        assert dtype is not None
        return weight.to(dtype=dtype).dequantize()
    return weight if dtype is None else weight.to(dtype)


def _write_folder(checkpoint: Checkpoint, weights: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir()
    matrix = next(weight for weight in weights.values() if weight.dim() > 1)
    left_out = (MANIFEST, "torch_dtype")
    config = {name: value for name, value in without_methods(checkpoint.config).items() if name not in left_out}
    config["dtype"] = str(matrix.dtype).removeprefix("torch.")
    if isinstance(checkpoint, GgufCheckpoint):
        config["model_type"] = _model_type(*config["architectures"])
        _write_gguf_texts(checkpoint, folder)
    else:
        copy_small_files(checkpoint.path, folder)
    _write_json(folder / "config.json", config)
    write_safetensors(with_stacked_experts(weights, config["architectures"][0]), folder / WEIGHTS)


def _model_type(architecture: str) -> str:
    """What transformers calls the config of an architecture."""
    name = architecture.removesuffix("ForCausalLM")
    return _MODEL_TYPES.get(name, name.lower())


def _write_gguf_texts(checkpoint: GgufCheckpoint, folder: Path) -> None:
    """The tokenizer, its template and the ids that end texts, as the Hugging Face layout has them."""
    eos = {"eos_token_id": list(checkpoint.eos)} if checkpoint.eos else {}
    if generation := checkpoint.generation_config | eos:
        _write_json(folder / "generation_config.json", generation)
    if checkpoint.tokenizer is None:
        return
    if others := checkpoint.tokenizer.decoded_otherwise:
        warn(
            f"tokenizer.json has no way to say the texts of {len(others)} tokens of {checkpoint.path} (the first is id "
            f"{others[0]}): ids stay the same, and these are decoded to other text"
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
    """Raise unless the GGUF file is of the same architecture as these fields of the source's config.json."""
    if read_config(_as_float32(GgufCheckpoint(file).config)) != read_config(_as_float32(fields)):
        raise RequestError(
            f"{source}: its config.json says what GGUF's metadata do not, such as a sliding window or another RoPE "
            "schedule"
        )


def _as_float32(value: Any) -> Any:
    """A JSON value with its floats as GGUF's metadata store them."""
    if isinstance(value, dict):
        return {name: _as_float32(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_float32(item) for item in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
