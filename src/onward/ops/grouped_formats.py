"""Formats of weights whose inputs share scales in groups: what a packed weight holds, and the values it stands for.

A weight is value(code) * scale - minimum. A code has `bits` bits; its value is code - offset, or the table's. A group
of `group` inputs shares scale and minimum. One-level formats store both as float16 (MXFP4: the scale as an exponent);
two-level ones store a small integer for each group and a float16 for each 256 inputs, and multiply in float32, where
the product is exact. All of these are GGUF's types (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); blocks
of a type go into its format without loss.

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


class GroupedFormat(NamedTuple):
    """bits: of a code. group: inputs of a scale. levels: 1 or 2. minimum: whether there are minima. signed: whether a
    two-level format's integers are. exponent: whether a scale is E8M0, 2^(e - 128), instead of float16."""

    bits: int
    group: int = 32
    levels: int = 1
    offset: int = 0
    minimum: bool = False
    signed: bool = False
    exponent: bool = False
    table: tuple[int, ...] | None = None

    @property
    def unit(self) -> int:
        """Inputs that are packed together: their scales stand in front of their codes in whole lines of 64 bytes."""
        return SUPER if self.levels == 2 else 128 if self.exponent else 64

    @property
    def header_bytes(self) -> int:
        """Of 16 rows' scales in a unit."""
        if self.levels == 2:
            return 64 + SUPER // self.group * 16 * (1 + self.minimum)
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
}


class Parts(NamedTuple):
    """What a weight [N, K] in a grouped format holds.

    codes: uint8 [N, K]. scales: float16 (E8M0: uint8) [N, one for each group, or each 256 inputs of a two-level
    format]. minima: as scales, or None. sub_scales: uint8 or int8 [N, groups] of a two-level format. sub_minima: uint8.
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
