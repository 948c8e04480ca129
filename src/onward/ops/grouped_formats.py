"""Formats of weights whose inputs share scales in groups: what a packed weight holds, and the values it stands for.

A weight is value(code) * scale - minimum. A code has `bits` bits; its value is code - offset, or the table's. A group
of `group` inputs shares scale and minimum. One-level formats store both as float16 (MXFP4: the scale as an exponent);
two-level ones store a small integer for each group and a float16 for each 256 inputs, and multiply in float32, where
the product is exact. Most are GGUF's types (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); blocks of a
type go into its format without loss. The others hold what checkpoints in the Hugging Face layout have
(`onward.checkpoint.quantizers`), without loss, too:

    uint4, uint4_128, uint8_128    (code - zero point) * scale, in groups of 32 or 128
    nvfp4                          FP4 in groups of 16; scales are E4M3 over a float32 of the matrix
    fp8, nf4                       a float32 for each code, and float32 scales: these are multiplied with floats

Shapes: N rows (outputs), K inputs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SUPER = 256  # inputs that share the float16 numbers of a two-level format

# 16 values that codes of 4 bits choose from. IQ4: llama.cpp's; they are denser near 0. E2M1: FP4 of the OCP
# Microscaling Formats (arXiv 2310.10537), doubled, so that all are whole numbers.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# The same for formats of floats. NF4 of bitsandbytes: quantiles of a normal distribution (arXiv 2305.14314). E4M3: all
# 256 numbers of FP8 (arXiv 2209.05433).
NF4 = tuple(
    torch.tensor([
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]).tolist()
)  # fmt: skip
E4M3 = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).tolist())


class GroupedFormat(NamedTuple):
    """bits: of a code. group: inputs of a scale. levels: 1 or 2. minimum: whether there are minima. signed: whether a
    two-level format's integers are. exponent: whether a scale is E8M0, 2^(e - 128), instead of float16. zeros: whether
    a minimum is the scale times a zero point of 8 bits. divided: whether a group's scale is E4M3 over a float32.
    floats: whether scales are float32, and codes stand for float32, too."""

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
        """Inputs that are packed together: their scales stand in front of their codes in whole lines of 64 bytes."""
        if self.floats:
            return self.group
        return SUPER if self.levels == 2 else 128 if self.exponent or self.zeros else 64

    @property
    def header_bytes(self) -> int:
        """Of 16 rows' scales in a unit."""
        if self.floats:
            return 64
        if self.levels == 2:
            return 64 + SUPER // self.group * 16 * (1 + self.minimum)
        if self.zeros:
            return -(-self.unit // self.group * 48 // 64) * 64
        return self.unit // self.group * 16 * (1 if self.exponent else 2) * (1 + self.minimum)

    @property
    def unit_bytes(self) -> int:
        """Of 16 rows' unit."""
        return self.header_bytes + self.unit * 16 * self.bits // 8


GROUPED_FORMATS = {
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
    """What a weight [N, K] in a grouped format holds.

    codes: uint8 [N, K]. scales: float16 (E8M0: uint8; divisors, and of floats: float32) [N, one for each group, or each
    256 inputs of a two-level format]. minima: as scales, or None. sub_scales: uint8 or int8 [N, groups] of a two-level
    format (E4M3 as uint8). sub_minima: uint8 [N, groups], or the zero points.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    sub_scales: Tensor | None = None
    sub_minima: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Parts":
        """The same of every tensor that is there."""
        return Parts(*(None if part is None else change(part) for part in self))  # type: ignore[arg-type]


def grouped_values(format: GroupedFormat, parts: Parts) -> Tensor:
    """float32 [N, K], with the roundings of ggml's own dequantization: one for each product and difference."""
    if format.table is not None:
        values = torch.tensor(format.table, dtype=torch.float32, device=parts.codes.device)[parts.codes.long()]
    else:
        values = parts.codes.to(torch.float32) - format.offset
    grouped = values.view(len(values), -1, format.group)
    if format.zeros:
        assert parts.sub_minima is not None
        grouped = (grouped - parts.sub_minima.unsqueeze(-1)) * parts.scales.to(torch.float32).unsqueeze(-1)
        return grouped.flatten(1)
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
