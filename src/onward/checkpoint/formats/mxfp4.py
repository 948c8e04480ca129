"""MXFP4 (OCP Microscaling Formats, arXiv 2310.10537), as gpt-oss stores its experts.

Rows of a weight are stored in blocks uint8 [N, K / 32, 16], the low four bits of each byte first, with scales uint8
[N, K / 32], exponents of 2 plus 127. Only experts are quantized, all of a layer in one tensor, so no module has parts
of its own: `onward.checkpoint.stored_names` locates each expert's rows.
"""

from collections.abc import Mapping, Set
from typing import Any

import torch

from onward.checkpoint.formats.settings import Fields, QuantizationMethod, Read
from onward.checkpoint.formats.stored import Mxfp4, Shape

FIELDS = Fields(read=frozenset())  # the tensors show which weights are quantized


def read_method(settings: Mapping[str, Any]) -> QuantizationMethod:
    FIELDS.check(settings)
    return QuantizationMethod(set(), set(), decode)


def decode(read: Read, names: Set[str], shape: Shape) -> Mxfp4:
    """The weight of "blocks" and "scales"."""
    blocks, scales, groups = read("blocks"), read("scales"), (shape[0], shape[1] // 32)
    fits = shape[1] % 32 == 0 and tuple(blocks.shape) == (*groups, 16) and tuple(scales.shape) == groups
    if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise ValueError(
            f"MXFP4 of {list(shape)} requires blocks uint8 {[*groups, 16]} and scales uint8 {list(groups)}; got "
            f"{blocks.dtype} {list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
        )
    return Mxfp4(blocks.flatten(1), scales)
