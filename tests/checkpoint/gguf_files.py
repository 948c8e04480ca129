"""Small GGUF models, written by llama.cpp's own package, and the twins they come from."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from onward.checkpoint.gguf.families import gguf_name
from onward.models import Scope, read_config

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Types that the package can write; of the others (K-quants) the tests draw the bytes of blocks.
WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
TYPES = (*WRITABLE, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
CONFIG = {
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 352,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


class _Drawn:
    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._random = torch.Generator().manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.tensors[name] = torch.randn(shape, generator=self._random) * 0.05 + (len(shape) == 1)
        return self.tensors[name]


def blocks_of(type: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """uint8 [N, bytes]: random blocks of a type, with finite scales of the size that weights have."""
    weights, size = gguf.GGML_QUANT_SIZES[Kind[type]]
    random = np.random.default_rng(seed)
    count = shape[0] * shape[1] // weights
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    largest = {"Q2_K": 3 * 15, "Q3_K": 4 * 32, "Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q6_K": 32 * 127, "IQ4_XS": 127 * 32}
    for at in scales_at(type):
        levels = (random.standard_normal(count) * 0.1 / largest.get(type, 127)).astype(np.float16)
        blocks[:, at : at + 2] = levels.view(np.uint8).reshape(count, 2)
    if type == "MXFP4":
        blocks[:, 0] = random.integers(118, 124, count)
    return blocks.reshape(shape[0], -1)


def scales_at(type: str) -> tuple[int, ...]:
    """Where a block has its float16 numbers."""
    at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
    return at.get(type, (0, 2) if type in ("Q4_1", "Q5_1") else (0,))


def dequantized(raw: np.ndarray, type: str) -> torch.Tensor:
    """float32, by the package."""
    return torch.from_numpy(gguf.quants.dequantize(raw, Kind[type]).astype(np.float32))


def write_model(
    file: Path,
    architecture: str = "qwen3",
    type: str = "Q8_0",
    *,
    types: dict[str, str] | None = None,
    metadata=lambda writer: None,
    split_after: int = 0,
    seed: int = 0,
    **changes: object,
) -> tuple[dict, dict[str, torch.Tensor]]:
    """Write a model; returns the config.json and the float32 weights of its twin in the Hugging Face layout.

    type: of all matrices; `types` of single ones, by their stock names. metadata: adds to the file's.
    split_after: the most tensors of a part (0: one file).
    """
    config = CONFIG | {"architectures": [ARCHITECTURES[architecture]]} | changes
    drawn = _Drawn(seed)
    read_config(config).read(Scope(drawn))
    options = {"split_max_tensors": split_after} if split_after else {}
    writer = gguf.GGUFWriter(file, architecture, use_temp_file=False, **options)
    _write_config(writer, config)
    metadata(writer)
    twin = {}
    for at, (name, tensor) in enumerate(drawn.tensors.items()):
        kind = (types or {}).get(name, type) if tensor.dim() == 2 else "F32"
        raw = _raw(tensor, kind, seed + at)
        twin[name] = dequantized(raw, kind)
        if architecture == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            raw = permuted(raw, config["head_dim"])
        writer.add_tensor(gguf_name(name), raw, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, twin


def permuted(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """The rows as the converter's LlamaModel writes them."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _raw(tensor: torch.Tensor, type: str, seed: int) -> np.ndarray:
    if type in WRITABLE:
        return gguf.quantize(tensor.numpy(), Kind[type])
    return blocks_of(type, tuple(tensor.shape), seed)


def _write_config(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
