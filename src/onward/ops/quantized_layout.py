"""The memory layout of quantized weights in torch, which defines the input of the kernels; native/src/linear/layout.h
has it in C++.

Rows are in blocks of 16. A block of int8 has 16 scales (float32), then for every 4 inputs a line of 64 bytes: 4 bytes
per row, each q + 128. All other formats have a scale for each group of inputs. Their block is a sequence of *units* of
inputs (64, 128 for MXFP4, 256 for two-level formats): a header with the 16 rows' scales, then for every 32 inputs
*lines* of 64 bytes, 4 bytes per row. Codes are in at most two planes of 8, 4, 2 or 1 bits: byte j of a row in a line
has the inputs j, 4 + j, 8 + j … of the line, the first in the lowest bits. Headers:

    one level      16 scales of each group, then 16 minima (or zero points, of a byte) of each group
    two levels     16 scales and 16 minima (float16), or 16 divisors (float32); then for each group 16 small scales and
                   16 small minima
    floats         16 scales (float32)

fp8 has 16 bytes, one per row, for every input instead of planes.

Shapes: N rows (outputs), K inputs; `data` is uint8 [blocks, bytes of a block]. Functions that take data take any slice
of its blocks.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 16  # rows
LINE = 32  # inputs per line
GROUP = 32  # inputs that share a scale of int4 or iq4_nl
SUPER = 256  # inputs that share the float16 numbers of a two-level format
MAX_INPUTS = 65536  # the int32 sums of a longer row could overflow
_INT8_HEADER = 64  # bytes: 16 scales
_AT_ONCE = 256  # ids whose blocks are unpacked together

# The 16 values of 4-bit codes. IQ4: llama.cpp's, denser near 0. E2M1: FP4 of the OCP Microscaling Formats (arXiv
# 2310.10537), doubled, so that all are integers.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Values of codes as floats. NF4 of bitsandbytes: quantiles of a normal distribution (arXiv 2305.14314). E4M3: all 256
# numbers of FP8 (arXiv 2209.05433).
NF4 = tuple(
    torch.tensor([
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]).tolist()
)  # fmt: skip
E4M3 = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).tolist())


class GroupedFormat(NamedTuple):
    """bits: of a code. group: inputs per scale. levels: 1 or 2. minimum: has minima. signed: a two-level format's
    integers are. exponent: scales are E8M0, 2^(e - 128), instead of float16. zeros: a minimum is the scale times a zero
    point of 8 bits. divided: a group's scale is E4M3 over a float32. floats: scales and values are float32."""

    bits: int
    group: int = 32
    levels: int = 1
    offset: int = 0
    minimum: bool = False
    signed: bool = False
    exponent: bool = False
    table: tuple[float, ...] | None = None
    zeros: bool = False
    divided: bool = False
    floats: bool = False

    @property
    def unit(self) -> int:
        """Inputs that are packed together: their scales precede their codes in whole lines of 64 bytes."""
        if self.floats:
            return self.group
        return SUPER if self.levels == 2 else 128 if self.exponent or self.zeros else 64

    @property
    def header_bytes(self) -> int:
        """Bytes of 16 rows' scales in a unit."""
        if self.floats:
            return 64
        if self.levels == 2:
            return 64 + SUPER // self.group * 16 * (1 + self.minimum)
        if self.zeros:
            return -(-self.unit // self.group * 48 // 64) * 64
        return self.unit // self.group * 16 * (1 if self.exponent else 2) * (1 + self.minimum)

    @property
    def unit_bytes(self) -> int:
        """Bytes of 16 rows' unit."""
        return self.header_bytes + self.unit * 16 * self.bits // 8


GROUPED_FORMATS = {
    "int4": GroupedFormat(4, offset=8),
    "q8_0": GroupedFormat(8, offset=128),
    "q4_1": GroupedFormat(4, minimum=True),
    "q5_0": GroupedFormat(5, offset=16),
    "q5_1": GroupedFormat(5, minimum=True),
    "q4_k": GroupedFormat(4, levels=2, minimum=True),
    "q5_k": GroupedFormat(5, levels=2, minimum=True),
    "q6_k": GroupedFormat(6, group=16, levels=2, offset=32, signed=True),
    "q2_k": GroupedFormat(2, group=16, levels=2, minimum=True),
    "q3_k": GroupedFormat(3, group=16, levels=2, offset=4, signed=True),
    "iq4_nl": GroupedFormat(4, table=IQ4),
    "iq4_xs": GroupedFormat(4, levels=2, signed=True, table=IQ4),
    "mxfp4": GroupedFormat(4, exponent=True, table=E2M1),
    "uint4": GroupedFormat(4, minimum=True, zeros=True),
    "uint4_128": GroupedFormat(4, group=128, minimum=True, zeros=True),
    "uint8_128": GroupedFormat(8, group=128, minimum=True, zeros=True),
    "nvfp4": GroupedFormat(4, group=16, levels=2, divided=True, table=E2M1),
    "fp8": GroupedFormat(8, group=128, table=E4M3, floats=True),
    "nf4": GroupedFormat(4, group=64, table=NF4, floats=True),
}


class Parts(NamedTuple):
    """The numbers of a weight [N, K] in a grouped format.

    codes: uint8 [N, K]. scales: float16 (E8M0: uint8; divisors, and of floats: float32) [N, one per group, or per 256
    inputs of a two-level format]. minima: as scales, or None. sub_scales: uint8 or int8 [N, groups] of a two-level
    format (E4M3 as uint8). sub_minima: uint8 [N, groups], or the zero points.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    sub_scales: Tensor | None = None
    sub_minima: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Parts":
        """The parts with a function applied to every tensor."""
        return Parts(*(None if part is None else change(part) for part in self))  # type: ignore[arg-type]


@functools.cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The values on a device, uploaded once: a CUDA graph cannot upload any."""
    with torch._C._DisableFuncTorch():
        return torch.tensor(values, dtype=torch.float32, device=device)


def grouped_values(format: GroupedFormat, parts: Parts) -> Tensor:
    """float32 [N, K], with the roundings of ggml's own dequantization: one per product and difference."""
    if format.table is not None:
        values = _table(format.table, parts.codes.device)[parts.codes.long()]
    else:
        values = parts.codes.to(torch.float32) - format.offset
    grouped = values.view(len(values), -1, format.group)
    if format.zeros:
        assert parts.sub_minima is not None
        return ((grouped - parts.sub_minima.unsqueeze(-1)) * parts.scales.to(torch.float32).unsqueeze(-1)).flatten(1)
    if format.divided:
        assert parts.sub_scales is not None
        e4m3 = parts.sub_scales.view(torch.float8_e4m3fn).to(torch.float32) / 2  # the table's values are doubled
        return (grouped * (e4m3 / parts.scales.repeat_interleave(SUPER // format.group, 1)).unsqueeze(-1)).flatten(1)
    scales = e8m0(parts.scales) if format.exponent else parts.scales.to(torch.float32)
    grouped = grouped * _per_group(scales, parts.sub_scales)
    if parts.minima is not None:
        grouped = grouped - _per_group(parts.minima.to(torch.float32), parts.sub_minima)
    return grouped.flatten(1)


def _per_group(level: Tensor, sub: Tensor | None) -> Tensor:
    """float32 [N, groups, 1]."""
    if sub is not None:
        groups = sub.view(len(sub), level.shape[1], -1).to(torch.float32)
        level = (groups * level.unsqueeze(-1)).flatten(1)
    return level.unsqueeze(-1)


def e8m0(exponents: Tensor) -> Tensor:
    """uint8 e -> float32 2^(e - 128), subnormal for 0 and 1. The table's values are doubled, so the scale is halved."""
    wide = exponents.to(torch.int32)
    return torch.where(wide < 2, 0x00200000 << wide.clamp(max=1), (wide - 1) << 23).view(torch.float32)


def pack_parts(format: GroupedFormat, parts: Parts) -> Tensor:
    """Parts of [N, K], K a multiple of a block of the format -> data. Rows and inputs are padded with zeros (tables:
    with the first value times a scale of 0)."""
    rows, inputs = parts.codes.shape
    blocks, units = math.ceil(rows / BLOCK), math.ceil(inputs / format.unit)

    def by_unit(part: Tensor, per_unit: int, padding: int = 0) -> Tensor:
        """[N, count] -> [blocks, units, per_unit, 16 rows]."""
        padded = pad(part, (0, units * per_unit - part.shape[1], 0, -rows % BLOCK), value=padding)
        return padded.view(blocks, BLOCK, units, per_unit).permute(0, 2, 3, 1)

    numbers = format.unit // (SUPER if format.levels == 2 else format.group)
    scales = by_unit(parts.scales, numbers, int(format.divided))  # a divisor is never 0
    headers = [_as_bytes(scales)] + ([] if parts.minima is None else [_as_bytes(by_unit(parts.minima, numbers))])
    if format.zeros:
        assert parts.sub_minima is not None
        header = torch.cat([*headers, _as_bytes(by_unit(parts.sub_minima, numbers))], -1)
        headers = [pad(header, (0, format.header_bytes - header.shape[-1]))]
    elif parts.sub_scales is not None:
        top = torch.cat(headers, -1)
        headers = [pad(top, (0, 64 - top.shape[-1]))]
        small = [parts.sub_scales] if parts.sub_minima is None else [parts.sub_scales, parts.sub_minima]
        groups = [by_unit(part.view(torch.uint8), SUPER // format.group) for part in small]
        headers.append(torch.stack(groups, 3).flatten(2))
    zero = 0 if format.table is not None else format.offset
    codes = (
        by_unit(parts.codes, format.unit, zero).reshape(blocks, units, format.unit // LINE, LINE, BLOCK).transpose(3, 4)
    )
    if _by_input(format):
        lines = codes.transpose(3, 4).flatten(2)
    else:
        planes = [_plane(codes >> first & (1 << bits) - 1, bits) for first, bits in planes_of(format)]
        lines = torch.cat(planes, -1).flatten(2)
    return torch.cat([*headers, lines], -1).flatten(1)


def unpack_parts(format: GroupedFormat, data: Tensor) -> Parts:
    """The parts of all rows in `data`, including padding."""
    blocks = len(data)
    units = data.view(blocks, -1, format.unit_bytes)
    header, lines = units[..., : format.header_bytes], units[..., format.header_bytes :]

    def by_row(part: Tensor) -> Tensor:
        """[blocks, units, count, 16] -> [N, units * count]."""
        return part.permute(0, 3, 1, 2).reshape(blocks * BLOCK, -1)

    row_codes = by_row(_codes(format, lines.reshape(*lines.shape[:2], format.unit // LINE, -1)))
    if format.exponent:
        return Parts(row_codes, by_row(header.view(blocks, units.shape[1], -1, BLOCK)))
    if format.floats:
        return Parts(row_codes, by_row(header.contiguous().view(torch.float32).unsqueeze(2)))
    if format.zeros:
        groups = format.unit // format.group
        shape = blocks, units.shape[1], groups, BLOCK
        scales = header[..., : 32 * groups].contiguous().view(torch.float16).reshape(shape)
        zeros = header[..., 32 * groups : 48 * groups].reshape(shape)
        return Parts(row_codes, by_row(scales), sub_minima=by_row(zeros))
    if format.divided:
        divisors = header[..., :64].contiguous().view(torch.float32).view(blocks, units.shape[1], 1, BLOCK)
        small = header[..., 64:].reshape(blocks, units.shape[1], SUPER // format.group, BLOCK)
        return Parts(row_codes, by_row(divisors), None, by_row(small))
    if format.levels == 2:
        top = header[..., :64].contiguous().view(torch.float16).view(blocks, units.shape[1], 2, 1, BLOCK)
        small = header[..., 64:].reshape(blocks, units.shape[1], SUPER // format.group, -1, BLOCK)
        sub_scales = by_row(small[..., 0, :])
        sub_scales = sub_scales.view(torch.int8) if format.signed else sub_scales
        if not format.minimum:
            return Parts(row_codes, by_row(top[:, :, 0]), None, sub_scales)
        return Parts(row_codes, by_row(top[:, :, 0]), by_row(top[:, :, 1]), sub_scales, by_row(small[..., 1, :]))
    levels = header.contiguous().view(torch.float16).view(blocks, units.shape[1], 1 + format.minimum, -1, BLOCK)
    return Parts(row_codes, by_row(levels[:, :, 0]), by_row(levels[:, :, 1]) if format.minimum else None)


def _codes(format: GroupedFormat, lines: Tensor) -> Tensor:
    """Lines [blocks, units, unit / 32, bytes] -> codes [blocks, units, inputs, 16 rows]."""
    if _by_input(format):
        return lines.reshape(*lines.shape[:2], format.unit, BLOCK)
    codes, begin = torch.zeros((), dtype=torch.uint8, device=lines.device), 0
    for at, bits in planes_of(format):
        end = begin + 64 * bits
        codes = codes | _unplane(lines[..., begin:end], bits) << at
        begin = end
    return codes.transpose(3, 4).flatten(2, 3)


def planes_of(format: GroupedFormat) -> list[tuple[int, int]]:
    """(first bit, bits) of the planes of a code."""
    low = 8 if format.bits == 8 else 4 if format.bits >= 4 else 2
    return [(0, low)] if format.bits == low else [(0, low), (low, format.bits - low)]


def _by_input(format: GroupedFormat) -> bool:
    """Whether the 16 rows' codes of an input are adjacent, instead of in planes."""
    return format.floats and format.bits == 8


def _as_bytes(part: Tensor) -> Tensor:
    """[blocks, units, count, 16] -> uint8 [blocks, units, bytes]."""
    if part.numel() == 0:  # a tensor without elements is contiguous with any strides
        part = part.new_empty(part.shape)
    return part.contiguous().view(torch.uint8).flatten(2)


def _plane(fields: Tensor, bits: int) -> Tensor:
    """Fields of `bits` bits [..., 16 rows, 32] -> their lines [..., 64 * bits]."""
    count = 8 // bits
    parts = fields.reshape(*fields.shape[:-1], bits, count, 4)
    packed = parts[..., 0, :]
    for at in range(1, count):
        packed = packed | parts[..., at, :] << at * bits
    return packed.transpose(-3, -2).flatten(-3)


def _unplane(lines: Tensor, bits: int) -> Tensor:
    """Lines [..., 64 * bits] -> fields [..., 16 rows, 32]."""
    count = 8 // bits
    packed = lines.reshape(*lines.shape[:-1], bits, BLOCK, 4).transpose(-3, -2)
    fields = [packed >> at * bits & (1 << bits) - 1 for at in range(count)]
    return torch.stack(fields, -2).flatten(-3)


# ── by the name of a format ───────────────────────────────────────────────────────────────────────────────────


def data_shape(format: str, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of the data of a weight [N, K]."""
    blocks, inputs = math.ceil(shape[0] / BLOCK), shape[1]
    if format == "int8":
        return blocks, _INT8_HEADER + math.ceil(inputs / 4) * 64
    grouped = GROUPED_FORMATS[format]
    return blocks, math.ceil(inputs / grouped.unit) * grouped.unit_bytes


def num_groups(format: str, inputs: int) -> int:
    """The number of scales per row of int8, int4 or iq4_nl."""
    return 1 if format == "int8" else math.ceil(inputs / GROUP)


def pack(format: str, q: Tensor, scales: Tensor) -> Tensor:
    """int8 q [N, K] and scales [N, groups] -> data. int8: q in [-127, 127], float32 scales. int4: q in [-8, 7]; iq4_nl:
    indices 0 … 15 in the table; both with float16 scales."""
    rows, inputs = q.shape
    if format == "int8":
        padded = pad(q, (0, -inputs % 4, 0, -rows % BLOCK)).view(torch.uint8) ^ 128
        lines = padded.view(math.ceil(rows / BLOCK), BLOCK, math.ceil(inputs / 4), 4).transpose(1, 2)
        header = pad(scales.view(rows), (0, -rows % BLOCK)).view(-1, BLOCK).view(torch.uint8)
        return torch.cat((header, lines.flatten(1)), 1)
    codes = (q + GROUPED_FORMATS[format].offset).view(torch.uint8)
    codes = pad(codes, (0, -inputs % 64, 0, -rows % BLOCK), value=8)  # 8 in both formats
    return pack_parts(GROUPED_FORMATS[format], Parts(codes, pad(scales, (0, 0, 0, -rows % BLOCK))))


def unpack(format: str, data: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The q and scales of `pack`."""
    rows, inputs = shape
    if format == "int8":
        q, scales = _unpack_int8(data)
    else:
        parts = unpack_parts(GROUPED_FORMATS[format], data)
        q, scales = parts.codes.view(torch.int8) - GROUPED_FORMATS[format].offset, parts.scales
    return q[:rows, :inputs].contiguous(), scales[:rows, : num_groups(format, inputs)].contiguous()


def values(format: str, data: Tensor, inputs: int) -> Tensor:
    """The values of all rows in `data`, padding rows included: float32 [blocks * 16, K]."""
    if format == "int8":
        q, scales = _unpack_int8(data)
        return (q * scales)[:, :inputs]
    return grouped_values(GROUPED_FORMATS[format], unpack_parts(GROUPED_FORMATS[format], data))[:, :inputs]


def row_values(format: str, data: Tensor, ids: Tensor, inputs: int) -> Tensor:
    """The values of the rows at int64 ids [count]: float32 [count, K]. No other block is read."""
    rows = [data.new_empty((0, inputs), dtype=torch.float32)]
    for part in torch.split(ids, _AT_ONCE) if len(ids) else ():
        of_blocks = values(format, data[part // BLOCK], inputs).view(len(part), BLOCK, inputs)
        rows.append(of_blocks[torch.arange(len(part), device=ids.device), part % BLOCK])
    return torch.cat(rows)


def _unpack_int8(data: Tensor) -> tuple[Tensor, Tensor]:
    """q int8 [rows, padded K] and scales float32 [rows, 1], padding included."""
    lines = (data[:, _INT8_HEADER:].view(len(data), -1, BLOCK, 4) ^ 128).view(torch.int8)
    scales = data[:, :_INT8_HEADER].view(torch.float32).reshape(-1, 1)
    return lines.transpose(1, 2).reshape(len(scales), -1), scales
