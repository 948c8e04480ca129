"""MXFP4 (OCP Microscaling Formats, arXiv 2310.10537), as gpt-oss stores its experts.

Rows of a weight are stored in blocks uint8 [N, K / 32, 16], the low four bits of each byte first, with scales uint8
[N, K / 32], exponents of 2 plus 127. `onward.checkpoint.stacked_experts` locates each expert's rows.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.formats.settings import Fields, Read, Shape
from onward.checkpoint.gguf.blocks import pack_blocks
from onward.checkpoint.gguf.reader import TYPES
from onward.ops import QuantizedWeight
from onward.ops.formats import GROUPED_FORMATS, Parts, grouped_values

FIELDS = Fields(read=frozenset())  # the tensors show which weights are quantized
_MXFP4 = next(type for type in TYPES.values() if type.name == "MXFP4")


class Mxfp4:
    """Only experts are quantized, all of a layer in one tensor: no module has parts of its own."""

    def parts(self, names: set[str]) -> set[str]:
        return set()

    def weight(self, read: Read, names: set[str], shape: Shape) -> Tensor:
        return dequantized(read("blocks"), read("scales"), shape)

    def as_quantized(self, read: Read, names: set[str], shape: Shape, dtype: torch.dtype) -> QuantizedWeight | None:
        return packed(read("blocks"), read("scales"), shape, dtype)


def dequantized(blocks: Tensor, scales: Tensor, shape: Shape) -> Tensor:
    """float32 [N, K], exactly. Raises ValueError for invalid tensors."""
    _check(blocks, scales, shape)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    return grouped_values(GROUPED_FORMATS["mxfp4"], Parts(codes, scales))


def packed(blocks: Tensor, scales: Tensor, shape: Shape, dtype: torch.dtype) -> QuantizedWeight:
    """The same weight in its own bits, in the kernels' layout, representing one of `dtype`."""
    _check(blocks, scales, shape)
    # GGUF stores the scale before the codes, and a byte holds two codes that are 16 apart.
    rows = torch.empty((*scales.shape, 17), dtype=torch.uint8)
    first, last = blocks[..., :8], blocks[..., 8:]
    rows[..., 0] = scales
    rows[..., 1::2] = first & 15 | last << 4
    rows[..., 2::2] = first >> 4 | last & 240
    return pack_blocks(_MXFP4, rows.flatten(1), dtype)


def _check(blocks: Tensor, scales: Tensor, shape: Shape) -> None:
    groups = shape[0], shape[1] // 32
    fits = shape[1] % 32 == 0 and tuple(blocks.shape) == (*groups, 16) and tuple(scales.shape) == groups
    if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise ValueError(
            f"MXFP4 of {list(shape)} requires blocks uint8 {[*groups, 16]} and scales uint8 {list(groups)}; got "
            f"{blocks.dtype} {list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
        )
    if bool((scales == 255).any()):
        raise ValueError("it has scales that are not finite")


def read_method(settings: Mapping[str, Any]) -> Mxfp4:
    FIELDS.check(settings)
    return Mxfp4()
