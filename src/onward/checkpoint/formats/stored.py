"""Weights as other libraries store them: their values in float32, and the same values in Onward's formats.

A format holds a weight if its values equal `StoredWeight.values` bit for bit. In integer formats the products and
differences are exact in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onward.checkpoint.gguf.blocks import pack_blocks
from onward.checkpoint.gguf.reader import TYPES
from onward.ops import QuantizedWeight
from onward.ops.quantized_layout import GROUPED_FORMATS, MAX_INPUTS, NF4, SUPER, Parts, grouped_values, pack_parts

Shape = tuple[int, int]  # (N, K) of a weight
_WIDE, _NARROW = 128, 32  # group sizes of Onward's formats
# The values of FP4 codes (E2M1, OCP Microscaling Formats, arXiv 2310.10537).
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_MXFP4 = next(type for type in TYPES.values() if type.name == "MXFP4")


class StoredWeight(Protocol):
    """A weight [N, K]."""

    def values(self) -> Tensor:
        """float32 [N, K]."""

    def packed(self, dtype: torch.dtype) -> QuantizedWeight | None:
        """The weight, of `dtype`, as packed bits; None if no format holds it without loss."""


@dataclass(frozen=True)
class Floats:
    """A weight float32 [N, K] that no format holds."""

    weight: Tensor

    def values(self) -> Tensor:
        return self.weight

    def packed(self, dtype: torch.dtype) -> None:
        return None


@dataclass(frozen=True)
class Integers:
    """(code - zero) * scale. codes: 0 to 255 [N, K]. scales: [N, number of groups]. zeros: integers of the same shape,
    or one for all. groups: the inputs per group, or the group of each input, int64 [K]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | int
    groups: int | Tensor

    def values(self) -> Tensor:
        zeros = self.zeros if isinstance(self.zeros, int) else self._by_input(self.zeros)
        return (self.codes.float() - zeros) * self._by_input(self.scales)

    def _by_input(self, numbers: Tensor) -> Tensor:
        """Numbers by group, float32 [N, K]."""
        if isinstance(self.groups, int):
            return by_group(numbers.float(), self.groups, self.codes.shape[1])
        return numbers.float()[:, self.groups]

    def packed(self, dtype: torch.dtype) -> QuantizedWeight | None:
        if isinstance(self.groups, int):
            return self._packed(self.codes, self.groups, None, dtype)
        # Inputs of any groups of equal sizes: columns are sorted by group.
        group = int((self.groups == self.groups[0]).sum())
        in_order = torch.arange(len(self.groups)) // group
        if torch.equal(self.groups, in_order):
            return self._packed(self.codes, group, None, dtype)
        order = self.groups.argsort(stable=True)
        if not torch.equal(self.groups[order], in_order):
            return None
        return self._packed(self.codes[:, order], group, order, dtype)

    def _packed(self, codes: Tensor, group: int, order: Tensor | None, dtype: torch.dtype) -> QuantizedWeight | None:
        """order: int64 [K], the input that each column of codes multiplies; None for their own."""
        scales, zeros, inputs = self.scales, self.zeros, codes.shape[1]
        own = _WIDE if group % _WIDE == 0 or group >= inputs else _NARROW
        centre = zeros if isinstance(zeros, int) else _one_zero(zeros)
        if inputs > MAX_INPUTS or group < _NARROW or (own == _NARROW and group % _NARROW) or not _is_finite(scales):
            return None
        codes = codes.to(torch.uint8)
        wide = int(codes.max()) > 15
        if wide and group >= inputs and centre == 128:
            return QuantizedWeight.pack("int8", _signed(codes, 128), scales.to(torch.float32), dtype).in_order(order)
        halves = scales.to(torch.float16)
        exact = torch.equal(halves.to(torch.float32), scales.to(torch.float32))
        if not exact or (isinstance(zeros, Tensor) and (int(zeros.max()) > 255 or int(zeros.min()) < 0)):
            return None
        spread = halves if group == own else _spread(halves, group, own, inputs)
        if own == _NARROW and not wide and centre == 8:
            return QuantizedWeight.pack("int4", _signed(codes, 8), spread, dtype).in_order(order)
        if own == _NARROW and wide:
            return _in_format("q8_0", Parts(codes, spread), dtype, order) if centre == 128 else None
        points = torch.full_like(scales, zeros, dtype=torch.uint8) if isinstance(zeros, int) else zeros.to(torch.uint8)
        parts = Parts(codes, spread, sub_minima=_spread(points, group, own, inputs))
        return _in_format("uint4" if own == _NARROW else "uint8_128" if wide else "uint4_128", parts, dtype, order)


@dataclass(frozen=True)
class Float8:
    """code * scale. codes: float8_e4m3fn [N, K]. scales: float32 [N, ⌈K / group⌉]."""

    codes: Tensor
    scales: Tensor
    group: int

    def values(self) -> Tensor:
        return self.codes.float() * by_group(self.scales, self.group, self.codes.shape[1])

    def packed(self, dtype: torch.dtype) -> QuantizedWeight | None:
        inputs, bits = self.codes.shape[1], self.codes.view(torch.uint8)
        if (self.group % _WIDE and self.group < inputs) or inputs > MAX_INPUTS or _has_nan(bits):
            return None
        if not _is_finite(self.scales * 256):  # the kernel multiplies scales by 256
            return None
        return _in_format("fp8", Parts(bits, _spread(self.scales, self.group, _WIDE, inputs)), dtype)


@dataclass(frozen=True)
class Nvfp4:
    """FP4 codes [N, K] with scales float8_e4m3fn [N, K / 16], over one divisor."""

    codes: Tensor
    scales: Tensor
    divisor: Tensor

    def values(self) -> Tensor:
        inputs = self.codes.shape[1]
        factors = self.scales.float() / self.divisor.float()
        return _E2M1[self.codes] * by_group(factors, inputs // factors.shape[1], inputs)

    def packed(self, dtype: torch.dtype) -> QuantizedWeight | None:
        divisor, inputs, bits = self.divisor, self.codes.shape[1], self.scales.view(torch.uint8)
        numbers = divisor.numel() == 1 and bool(divisor.isfinite().all()) and float(divisor) > 0
        if inputs != 16 * self.scales.shape[1] or inputs > MAX_INPUTS or not numbers or _has_nan(bits):
            return None
        divisors = divisor.to(torch.float32).view(1, 1).expand(len(bits), -(-inputs // SUPER)).contiguous()
        return _in_format("nvfp4", Parts(self.codes.to(torch.uint8), divisors, None, bits), dtype)


@dataclass(frozen=True)
class Mxfp4:
    """FP4 codes uint8 [N, K / 2], the low four bits first, with scales uint8 [N, K / 32], exponents of 2 plus 127.
    Raises ValueError for a scale that is not finite."""

    codes: Tensor
    exponents: Tensor

    def __post_init__(self) -> None:
        if bool((self.exponents == 255).any()):
            raise ValueError("it has scales that are not finite")

    def values(self) -> Tensor:
        return grouped_values(GROUPED_FORMATS["mxfp4"], Parts(nibbles(self.codes), self.exponents))

    def packed(self, dtype: torch.dtype) -> QuantizedWeight | None:
        if 2 * self.codes.shape[1] > MAX_INPUTS:
            return None
        # GGUF stores the scale before the codes, and a byte holds two codes that are 16 apart.
        rows = torch.empty((*self.exponents.shape, 17), dtype=torch.uint8)
        blocks = self.codes.view(*self.exponents.shape, 16)
        first, last = blocks[..., :8], blocks[..., 8:]
        rows[..., 0] = self.exponents
        rows[..., 1::2] = first & 15 | last << 4
        rows[..., 2::2] = first >> 4 | last & 240
        return pack_blocks(_MXFP4, rows.flatten(1), dtype)


@dataclass(frozen=True)
class Table:
    """table[code] * scale. codes: [N, K]. table: float32 [16]. scales: float32, one for each run of `run` weights."""

    codes: Tensor
    table: Tensor
    scales: Tensor
    run: int

    def values(self) -> Tensor:
        scales = self.scales.repeat_interleave(self.run)[: self.codes.numel()].view(self.codes.shape)
        return self.table[self.codes.long()] * scales

    def packed(self, dtype: torch.dtype) -> QuantizedWeight | None:
        (rows, inputs), own = self.codes.shape, GROUPED_FORMATS["nf4"].group
        is_nf4 = torch.equal(self.table, torch.tensor(NF4)) and _is_finite(self.scales)
        if not is_nf4 or self.run % own or inputs % self.run or inputs > MAX_INPUTS:  # runs may span rows
            return None
        scales = _spread(self.scales.view(rows, -1), self.run, own, inputs)
        return _in_format("nf4", Parts(self.codes.to(torch.uint8), scales), dtype)


def _in_format(format: str, parts: Parts, dtype: torch.dtype, order: Tensor | None = None) -> QuantizedWeight:
    rows, inputs = parts.codes.shape
    return QuantizedWeight(pack_parts(GROUPED_FORMATS[format], parts), format, (rows, inputs), dtype).in_order(order)


def _spread(numbers: Tensor, group: int, own: int, inputs: int) -> Tensor:
    """[N, ⌈K / group⌉] -> [N, ⌈K / own⌉]: each group's number for all of the smaller groups in it."""
    count = -(-inputs // own)
    repeated = numbers.expand(-1, count) if group >= inputs else numbers.repeat_interleave(group // own, dim=1)
    return repeated[:, :count].contiguous()


def _one_zero(zeros: Tensor) -> int | None:
    """The zero point that all groups share; None if they differ."""
    first = int(zeros.flatten()[0])
    return first if bool((zeros == first).all()) else None


def _signed(codes: Tensor, offset: int) -> Tensor:
    return (codes.to(torch.int16) - offset).to(torch.int8)


def _is_finite(scales: Tensor) -> bool:
    return bool(scales.to(torch.float32).isfinite().all())


def _has_nan(bits: Tensor) -> bool:
    """Whether the bytes of E4M3 numbers include a NaN."""
    return bool(((bits & 127) == 127).any())


# ── the parts of a weight ─────────────────────────────────────────────────────────────────────────────────────


def by_group(scales: Tensor, group: int, inputs: int) -> Tensor:
    """[N, ⌈K / group⌉] -> [N, K], each group's number repeated for its inputs."""
    if scales.shape[1] != (count := -(-inputs // group)):
        raise ValueError(f"{inputs} inputs in groups of {group} require {count} scales; got {scales.shape[1]}")
    return scales.repeat_interleave(group, dim=1)[:, :inputs]


def scales_by_row(
    scale: Tensor, shape: Shape, block: Shape | None = None, groups: Sequence[int] = ()
) -> tuple[Tensor, int]:
    """The scales of each row, [N, ⌈K / group⌉], and the inputs of a group, from one number for all, for each row, for
    each group of a row, or for each block. block: its rows and inputs. groups: as in `inputs_per_scale`."""
    if scale.numel() == 1:
        return scale.view(1, 1).expand(shape[0], 1), shape[1]
    if scale.dim() == 2 and block is not None and scale.shape[0] != shape[0]:
        return rows_of_blocks(scale, block, shape), block[1]
    scale = scale.view(len(scale), -1)
    if scale.shape[0] != shape[0]:
        raise ValueError(f"scales {list(scale.shape)} do not match a weight {list(shape)}")
    return scale, inputs_per_scale(scale.shape[1], shape[1], groups)


def inputs_per_scale(count: int, inputs: int, groups: Sequence[int] = ()) -> int:
    """The inputs that share one of `count` scales. groups: the possible sizes; by default they are equal."""
    if count == 1:
        return inputs
    sizes = groups or ((inputs // count,) if count and inputs % count == 0 else ())
    group = next((size for size in sizes if -(-inputs // size) == count), None)
    if group is None:
        grouped = f" in groups of {' or '.join(map(str, groups))} (group_size)" if groups else ""
        raise ValueError(f"{inputs} inputs{grouped} do not match {count} scales")
    return group


def rows_of_blocks(scales: Tensor, block: Shape, shape: Shape) -> Tensor:
    """[⌈N / block[0]⌉, ⌈K / block[1]⌉] -> [N, ⌈K / block[1]⌉], each block's number repeated for its rows."""
    expected = tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
    if tuple(scales.shape) != expected:
        got, shapes = list(scales.shape), f"{list(shape)} in blocks of {list(block)}"
        raise ValueError(f"a weight {shapes} requires scales {list(expected)}; got {got}")
    return scales.repeat_interleave(block[0], dim=0)[: shape[0]]


def unpacked(packed: Tensor, bits: int, dim: int, *, is_stream: bool = True) -> Tensor:
    """int32 [M, N] -> int32 with 32 / bits times as many along `dim`: the fields of each integer, lowest bits first.

    is_stream: whether fields of a width that does not divide 32 span two integers, so that `bits` integers hold 32
    fields; otherwise each holds 32 // bits whole ones.
    """
    if packed.dtype != torch.int32 or packed.dim() != 2:
        raise ValueError(f"packed integers must be int32 [M, N]; got {packed.dtype} {list(packed.shape)}")
    if 32 % bits and is_stream:
        return _unpacked_stream(packed, bits) if dim else _unpacked_stream(packed.T, bits).T
    shifts = torch.arange(0, 33 - bits, bits, dtype=torch.int32)
    fields: Tensor = (packed.unsqueeze(dim + 1) >> (shifts if dim else shifts.unsqueeze(1))) & (2**bits - 1)
    return fields.flatten(dim, dim + 1)


def _unpacked_stream(packed: Tensor, bits: int) -> Tensor:
    """int32 [M, N * bits] -> int32 [M, N * 32]: the fields of runs of `bits` integers."""
    if packed.shape[1] % bits:
        raise ValueError(f"{bits}-bit integers are packed into runs of {bits}; got {packed.shape[1]}")
    words = packed.reshape(len(packed), -1, bits).long() & 0xFFFFFFFF
    starts = torch.arange(32) * bits
    first, shifts = starts // 32, starts % 32
    # If a field ends inside its integer, the bits from the next one lie above the mask.
    fields = words[..., first] >> shifts | words[..., (first + 1).clamp(max=bits - 1)] << (32 - shifts)
    streamed: Tensor = (fields & (2**bits - 1)).to(torch.int32).flatten(1)
    return streamed


def nibbles(packed: Tensor) -> Tensor:
    """uint8 [N, K / 2] -> int64 [N, K], the low four bits first."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed 4-bit codes must be uint8; got {packed.dtype}")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
