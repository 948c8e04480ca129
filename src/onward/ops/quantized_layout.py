"""The memory layout of quantized weights in torch, which defines the input of the kernels.

This file has the formats that `quantize` produces; those of GGUF are in `formats`. int8 and int4 are symmetric,
scale * q: int8 with a float32 scale per row and q in [-127, 127]; int4 with a float16 scale (of either sign) per row
and group of 32 inputs and q in [-8, 7]. iq4_nl, one of GGUF's, has the layout of int4; its q are indices 0 … 15 in a
table. The layout is that of native/src/linear/layout.h; docs/quantized-checkpoints.md draws it.

Shapes: N rows (outputs), K inputs. Rows are in blocks of 16; N and K are padded with zeros. `data` is uint8 [blocks,
bytes of a block]. Functions that take data take any slice of its blocks.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from onward.ops.formats import GROUPED_FORMATS, block_bytes, packed_values

BLOCK = 16  # rows
GROUP = 32  # inputs that share a scale of int4 or iq4_nl
MAX_INPUTS = 65536  # the int32 sums of a longer row could overflow

_INT8_HEADER = 64  # bytes: 16 scales
_PAIR_BYTES = 576  # two groups of int4: 2 x 16 scales, then 8 lines of 64 bytes


def data_shape(format: str, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of the data of a weight [N, K]."""
    blocks, inputs = math.ceil(shape[0] / BLOCK), shape[1]
    if format == "int8":
        return blocks, _INT8_HEADER + math.ceil(inputs / 4) * 64
    if format in GROUPED_FORMATS:
        return blocks, block_bytes(GROUPED_FORMATS[format], inputs)
    return blocks, math.ceil(inputs / 64) * _PAIR_BYTES


def num_groups(format: str, inputs: int) -> int:
    """The number of scales per row."""
    return 1 if format == "int8" else math.ceil(inputs / GROUP)


def pack(format: str, q: Tensor, scales: Tensor) -> Tensor:
    """int8 q [N, K] and scales [N, groups] (float32 for int8, else float16) -> data."""
    if format == "int8":
        return _pack_int8(q, scales)
    return _pack_int4(q - 8 if format == "iq4_nl" else q, scales)


def unpack(format: str, data: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The q and scales of `pack`."""
    rows, inputs = shape
    q, scales = _unpack_int8(data) if format == "int8" else _unpack_int4(data)
    q = q + 8 if format == "iq4_nl" else q
    return q[:rows, :inputs].contiguous(), scales[:rows, : num_groups(format, inputs)].contiguous()


def values(format: str, data: Tensor, inputs: int) -> Tensor:
    """The values of all rows in `data`, padding rows included: float32 [blocks * 16, K]."""
    if format in GROUPED_FORMATS:
        return packed_values(GROUPED_FORMATS[format], data, inputs)
    q, scales = _unpack_int8(data) if format == "int8" else _unpack_int4(data)
    return _scaled(q, scales, inputs)


def row_values(format: str, data: Tensor, ids: Tensor, inputs: int) -> Tensor:
    """The values of the rows at int64 ids [count]: float32 [count, K]. No other block is read."""
    block, row = ids // BLOCK, ids % BLOCK
    if format in GROUPED_FORMATS:
        if len(ids) == 0:
            return data.new_empty((0, inputs), dtype=torch.float32)
        of_blocks = values(format, data[block], inputs).view(len(ids), BLOCK, inputs)
        return of_blocks[torch.arange(len(ids), device=ids.device), row]
    if format == "int8":
        q = _signed(_int8_lines(data)[block, :, row]).flatten(1)
        return _scaled(q, _int8_scales(data)[block, row], inputs)
    q = _split(_int4_lines(data)[block, :, :, row]).flatten(1)
    return _scaled(q, _int4_scales(data)[block, :, :, row].flatten(1), inputs)


def _scaled(q: Tensor, scales: Tensor, inputs: int) -> Tensor:
    """q [rows, padded K] with scales [rows, groups] -> float32 [rows, K]."""
    rows, groups = scales.shape
    grouped = q.view(rows, groups, q.shape[1] // groups)
    return (grouped * scales.view(rows, groups, 1).to(torch.float32)).flatten(1)[:, :inputs]


# int8: 16 scales, then for every 4 inputs a line of 4 bytes per row, each q + 128.


def _pack_int8(q: Tensor, scales: Tensor) -> Tensor:
    rows, inputs = q.shape
    blocks, _ = data_shape("int8", (rows, inputs))
    padded = pad(q, (0, -inputs % 4, 0, -rows % BLOCK)).view(torch.uint8) ^ 128
    lines = padded.view(blocks, BLOCK, math.ceil(inputs / 4), 4).transpose(1, 2)
    header = pad(scales.view(rows), (0, -rows % BLOCK)).view(blocks, BLOCK).view(torch.uint8)
    return torch.cat((header, lines.flatten(1)), 1)


def _unpack_int8(data: Tensor) -> tuple[Tensor, Tensor]:
    """q int8 [rows, padded K] and scales float32 [rows, 1], padding included."""
    rows = len(data) * BLOCK
    return _signed(_int8_lines(data)).transpose(1, 2).reshape(rows, -1), _int8_scales(data).reshape(rows, 1)


def _int8_lines(data: Tensor) -> Tensor:
    """uint8 [blocks, lines, 16 rows, 4]."""
    return data[:, _INT8_HEADER:].view(len(data), -1, BLOCK, 4)


def _int8_scales(data: Tensor) -> Tensor:
    """float32 [blocks, 16, 1]."""
    return data[:, :_INT8_HEADER].view(torch.float32).view(-1, BLOCK, 1)


def _signed(stored: Tensor) -> Tensor:
    return (stored ^ 128).view(torch.int8)


# int4: for every 64 inputs 2 x 16 scales and 8 lines; byte j of a row in line i has q + 8 of inputs 8i + j (low half)
# and 8i + 4 + j (high half).


def _pack_int4(q: Tensor, scales: Tensor) -> Tensor:
    rows, inputs = q.shape
    blocks, count = math.ceil(rows / BLOCK), math.ceil(inputs / 64)
    padded = (pad(q, (0, -inputs % 64, 0, -rows % BLOCK)) + 8).view(torch.uint8)
    low, high = padded.view(blocks, BLOCK, count, 8, 2, 4).unbind(4)
    lines = (low | high << 4).permute(0, 2, 3, 1, 4)
    pairs = pad(scales, (0, scales.shape[1] % 2, 0, -rows % BLOCK)).view(blocks, BLOCK, count, 2).permute(0, 2, 3, 1)
    header = pairs.reshape(blocks, count, 2 * BLOCK).view(torch.uint8)
    return torch.cat((header, lines.flatten(2)), 2).flatten(1)


def _unpack_int4(data: Tensor) -> tuple[Tensor, Tensor]:
    """q int8 [rows, padded K] and scales float16 [rows, padded groups], padding included."""
    rows = len(data) * BLOCK
    q = _split(_int4_lines(data)).permute(0, 3, 1, 2, 4, 5)
    return q.reshape(rows, -1), _int4_scales(data).permute(0, 3, 1, 2).reshape(rows, -1)


def _int4_lines(data: Tensor) -> Tensor:
    """uint8 [blocks, pairs, 8 lines, 16 rows, 4]."""
    return data.view(len(data), -1, _PAIR_BYTES)[..., 64:].view(len(data), -1, 8, BLOCK, 4)


def _int4_scales(data: Tensor) -> Tensor:
    """float16 [blocks, pairs, 2, 16 rows]."""
    return data.view(len(data), -1, _PAIR_BYTES)[..., :64].view(torch.float16).view(len(data), -1, 2, BLOCK)


def _split(lines: Tensor) -> Tensor:
    """uint8 [..., 4] -> int8 [..., 2, 4]: the low halves, then the high."""
    return torch.stack((lines & 15, lines >> 4), -2).view(torch.int8) - 8
