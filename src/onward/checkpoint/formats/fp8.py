"""FP8 (E4M3, arXiv 2209.05433) with a scale for each block, as DeepSeek and Qwen publish it.

Tensors of a module: weight float8_e4m3fn [N, K], multiplied by weight_scale_inv float32 [⌈N / 128⌉, ⌈K / 128⌉]. Without
blocks, weight_scale has one number in total or per row. Activation scales (activation_scale, input_scale) are ignored:
Onward computes with float activations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.formats import repack
from onward.checkpoint.formats.bits import by_block, check_blocks
from onward.checkpoint.formats.settings import Fields, Read, Shape, words
from onward.ops import QuantizedWeight

_IGNORED = """
activation_scheme scale_fmt expert_dtype ignored_layers kv_cache_scheme weight_per_tensor kv_cache_dtype act_per_tensor
kv_cache_quant_method activation_scale_ub
"""
FIELDS = Fields(
    # The tensors' dtypes show whether scales are floats or exponents, and which experts are quantized.
    read=frozenset({"weight_block_size", "fmt"}),
    ignored=words(_IGNORED),
)
_TENSORS = {
    *("weight", "weight_scale_inv", "weight_scale", "activation_scale", "activation_scale_inv", "input_scale"),
    *("input_scale_inv", "input_scale_ub"),
}


@dataclass(frozen=True)
class Fp8:
    """block: rows and inputs that share a scale."""

    block: Shape

    def parts(self, names: set[str]) -> set[str]:
        return names & _TENSORS if names & {"weight_scale_inv", "weight_scale"} else set()

    def weight(self, read: Read, names: set[str], shape: Shape) -> Tensor:
        codes, scale = self._parts(read, names, shape)
        if scale.dim() == 2 and scale.shape != (shape[0], 1):
            scale = by_block(scale, self.block, shape)
        return codes.float() * (scale if scale.dim() == 2 else scale.view(-1, 1))

    def as_quantized(self, read: Read, names: set[str], shape: Shape, dtype: torch.dtype) -> QuantizedWeight | None:
        codes, scale = self._parts(read, names, shape)
        if scale.dim() == 2 and scale.shape != (shape[0], 1):
            rows, group = self.block
            check_blocks(scale, self.block, shape)
            return repack.e4m3(codes, scale.repeat_interleave(rows, dim=0)[: shape[0]], group, dtype)
        return repack.e4m3(codes, scale.view(-1, 1).expand(shape[0], 1), shape[1], dtype)

    def _parts(self, read: Read, names: set[str], shape: Shape) -> tuple[Tensor, Tensor]:
        """Codes [N, K], and scales: [N, 1], by block, or a vector of 1 or N."""
        codes = read("weight")
        if codes.dtype != torch.float8_e4m3fn or tuple(codes.shape) != shape:
            raise ValueError(f"FP8 weight must be float8_e4m3fn {list(shape)}; got {codes.dtype} {list(codes.shape)}")
        scale = read("weight_scale_inv" if "weight_scale_inv" in names else "weight_scale").float()
        scale = scale.view(1) if scale.numel() == 1 else scale
        if scale.dim() != 2 and scale.numel() not in (1, shape[0]):
            raise ValueError(f"{scale.numel()} scales for {shape[0]} rows")
        return codes, scale


def read_method(settings: Mapping[str, Any]) -> Fp8:
    FIELDS.check(settings)
    block = settings.get("weight_block_size") or [128, 128]
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ValueError(f"weight_block_size must be two sizes; got {block!r}")
    if settings.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise ValueError(f"FP8 supports the format 'e4m3'; got {settings['fmt']!r}")
    return Fp8((block[0], block[1]))
