"""Blocks of GGUF's types -> packed weights that the kernels multiply with; nothing is lost."""

import torch
from torch import Tensor

from onward.checkpoint.gguf.blocks import grouped_format, read_parts, scales_are_finite
from onward.checkpoint.gguf.types import BlockType
from onward.errors import CheckpointError
from onward.native import advise_huge_pages
from onward.native.interface import Status
from onward.ops import QuantizedWeight, quantized
from onward.ops.grouped_layout import pack_parts
from onward.ops.operators import usable_library
from onward.ops.quantized_layout import BLOCK, MAX_INPUTS, data_shape

# Rows that are packed at once without the native library, so that what lies between stays small.
_AT_ONCE = 64 * BLOCK


def packed_format(type: BlockType, inputs: int) -> str | None:
    """The format of ours that holds blocks of a type; None for floats, and for rows longer than a product can be."""
    if type.weights == 1 or inputs > MAX_INPUTS:
        return None
    return "int4" if type.name == "Q4_0" else type.name.lower()


def pack_blocks(type: BlockType, rows: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """rows: uint8 [N, bytes of a row] on the CPU. dtype: of the weight that the result stands for.

    Raises:
        CheckpointError: a scale is infinite or no number.
    """
    shape = len(rows), rows.shape[1] // type.size * type.weights
    format = packed_format(type, shape[1])
    assert format is not None
    library = usable_library()
    if library is None:
        data = torch.cat([_packed(type, rows[at : at + _AT_ONCE]) for at in range(0, shape[0], _AT_ONCE)])
        return QuantizedWeight(data, format, shape, dtype)
    data = torch.empty(data_shape(format, shape), dtype=torch.uint8)
    advise_huge_pages(data.data_ptr(), data.nbytes)
    status = library.onward_linear_pack_blocks(
        quantized.FORMATS[format], *shape, rows.data_ptr(), rows.stride(0), data.data_ptr()
    )
    # Its other arguments are right by what a reader of the file checks.
    if status == Status.BAD_ARGUMENT:
        raise _broken_scales()
    library.check(status, "onward_linear_pack_blocks")
    return QuantizedWeight(data, format, shape, dtype)


def _packed(type: BlockType, rows: Tensor) -> Tensor:
    parts = read_parts(type, rows)
    if not scales_are_finite(type, parts):
        raise _broken_scales()
    return pack_parts(grouped_format(type), parts)


def _broken_scales() -> CheckpointError:
    return CheckpointError("it has scales that are infinite or no numbers")
