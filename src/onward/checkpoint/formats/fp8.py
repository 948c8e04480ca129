"""FP8 (E4M3, arXiv 2209.05433) with a scale for each block, as DeepSeek and Qwen publish it.

Tensors of a module: weight float8_e4m3fn [N, K], multiplied by weight_scale_inv float32 [⌈N / 128⌉, ⌈K / 128⌉]. Without
blocks, weight_scale has one number in total or per row. Activation scales (activation_scale, input_scale) are ignored:
Onward computes with float activations.
"""

from collections.abc import Mapping, Set
from functools import partial
from typing import Any

import torch

from onward.checkpoint.formats.settings import Fields, QuantizationMethod, Read, words
from onward.checkpoint.formats.stored import Float8, Shape, scales_by_row

_IGNORED = """
activation_scheme scale_fmt expert_dtype ignored_layers kv_cache_scheme weight_per_tensor kv_cache_dtype act_per_tensor
kv_cache_quant_method activation_scale_ub
"""
# The tensors' dtypes show whether scales are floats or exponents, and which experts are quantized.
FIELDS = Fields(read=words("weight_block_size fmt"), ignored=words(_IGNORED))
_TENSORS = words("""
weight weight_scale_inv weight_scale activation_scale activation_scale_inv input_scale input_scale_inv input_scale_ub
""")


def read_method(settings: Mapping[str, Any]) -> QuantizationMethod:
    FIELDS.check(settings)
    block = settings.get("weight_block_size") or [128, 128]
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ValueError(f"weight_block_size must be two sizes; got {block!r}")
    if settings.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise ValueError(f"FP8 supports the format 'e4m3'; got {settings['fmt']!r}")
    return QuantizationMethod(_TENSORS, {"weight_scale_inv", "weight_scale"}, partial(_decode, (block[0], block[1])))


def _decode(block: Shape, read: Read, names: Set[str], shape: Shape) -> Float8:
    """block: rows and inputs that share a scale."""
    codes = read("weight")
    if codes.dtype != torch.float8_e4m3fn or tuple(codes.shape) != shape:
        raise ValueError(f"FP8 weight must be float8_e4m3fn {list(shape)}; got {codes.dtype} {list(codes.shape)}")
    scale = read("weight_scale_inv" if "weight_scale_inv" in names else "weight_scale").float()
    return Float8(codes, *scales_by_row(scale, shape, block, block[1:]))
