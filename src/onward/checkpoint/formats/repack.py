"""Repack weights that another library quantized into Onward's formats, without loss.

A format holds a weight if its values equal `QuantizationMethod.weight` bit for bit: float32, computed from integers,
zero points and scales. In integer formats these products and differences are exact in float32.
"""

import torch
from torch import Tensor

from onward.ops import QuantizedWeight
from onward.ops.formats import GROUPED_FORMATS, NF4, SUPER, Parts, pack_parts
from onward.ops.quantized_layout import MAX_INPUTS

_WIDE, _NARROW = 128, 32  # group sizes of Onward's formats


def integers(
    codes: Tensor, scales: Tensor, zeros: Tensor | int, group: int, dtype: torch.dtype, order: Tensor | None = None
) -> QuantizedWeight | None:
    """(code - zero) * scale; None if no format holds it. codes: 0 to 255 [N, K]. scales: [N, ⌈K / group⌉]. zeros:
    integers of the same shape, or one for all. dtype: of the weight that the result represents. order: int64 [K], the
    input that each column of codes multiplies; None for their own."""
    inputs = codes.shape[1]
    own = _WIDE if group % _WIDE == 0 or group >= inputs else _NARROW
    centre = _one_zero(zeros)
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
        return _packed("q8_0", Parts(codes, spread), inputs, dtype, order) if centre == 128 else None
    points = torch.full_like(scales, zeros, dtype=torch.uint8) if isinstance(zeros, int) else zeros.to(torch.uint8)
    parts = Parts(codes, spread, sub_minima=_spread(points, group, own, inputs))
    format = "uint4" if own == _NARROW else "uint8_128" if wide else "uint4_128"
    return _packed(format, parts, inputs, dtype, order)


def integers_of_groups(
    codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, dtype: torch.dtype
) -> QuantizedWeight | None:
    """`integers` for inputs with arbitrary groups, int64 [K], of equal sizes. Columns are sorted by group."""
    inputs = len(groups)
    group = int((groups == groups[0]).sum())
    in_order = torch.arange(inputs) // group
    if torch.equal(groups, in_order):
        return integers(codes, scales, zeros, group, dtype)
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], in_order):
        return None
    return integers(codes[:, order], scales, zeros, group, dtype, order)


def e4m3(codes: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> QuantizedWeight | None:
    """code * scale with codes float8_e4m3fn [N, K] and scales [N, ⌈K / group⌉]; None if no format holds it."""
    inputs = codes.shape[1]
    bits = codes.view(torch.uint8)
    if (group % _WIDE and group < inputs) or inputs > MAX_INPUTS or bool(((bits & 127) == 127).any()):
        return None
    if not _is_finite(scales * 256):  # the kernel multiplies scales by 256
        return None
    return _packed("fp8", Parts(bits, _spread(scales.to(torch.float32), group, _WIDE, inputs)), inputs, dtype)


def fp4(codes: Tensor, scales: Tensor, divisor: Tensor, dtype: torch.dtype) -> QuantizedWeight | None:
    """NVFP4: codes [N, K] with scales float8_e4m3fn [N, K / 16], over one float32 divisor."""
    inputs, bits = codes.shape[1], scales.view(torch.uint8)
    numbers = divisor.numel() == 1 and bool(divisor.isfinite().all()) and float(divisor) > 0
    if inputs != 16 * scales.shape[1] or inputs > MAX_INPUTS or not numbers or bool(((bits & 127) == 127).any()):
        return None
    divisors = divisor.to(torch.float32).view(1, 1).expand(len(codes), -(-inputs // SUPER)).contiguous()
    return _packed("nvfp4", Parts(codes.to(torch.uint8), divisors, None, bits), inputs, dtype)


def mxfp4(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> QuantizedWeight | None:
    """MXFP4: codes [N, K] with scales uint8 [N, K / 32], exponents of 2 plus 127."""
    inputs = codes.shape[1]
    if inputs != 32 * exponents.shape[1] or inputs > MAX_INPUTS or bool((exponents == 255).any()):
        return None
    return _packed("mxfp4", Parts(codes.to(torch.uint8), exponents), inputs, dtype)


def nf4(codes: Tensor, table: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> QuantizedWeight | None:
    """table[code] * scale with codes [N, K] and scales [N, K / group]; None if the table is not NF4's."""
    inputs, own = codes.shape[1], GROUPED_FORMATS["nf4"].group
    is_nf4 = torch.equal(table, torch.tensor(NF4)) and _is_finite(scales)
    if not is_nf4 or group % own or inputs % group or inputs > MAX_INPUTS:
        return None
    parts = Parts(codes.to(torch.uint8), _spread(scales.to(torch.float32), group, own, inputs))
    return _packed("nf4", parts, inputs, dtype)


def _packed(format: str, parts: Parts, inputs: int, dtype: torch.dtype, order: Tensor | None = None) -> QuantizedWeight:
    data = pack_parts(GROUPED_FORMATS[format], parts)
    return QuantizedWeight(data, format, (len(parts.codes), inputs), dtype).in_order(order)


def _spread(numbers: Tensor, group: int, own: int, inputs: int) -> Tensor:
    """[N, ⌈K / group⌉] -> [N, ⌈K / own⌉]: each group's number for all of the smaller groups in it."""
    count = -(-inputs // own)
    repeated = numbers.expand(-1, count) if group >= inputs else numbers.repeat_interleave(group // own, dim=1)
    return repeated[:, :count].contiguous()


def _one_zero(zeros: Tensor | int) -> int | None:
    """The zero point that all groups share; None if they differ."""
    if isinstance(zeros, int):
        return zeros
    first = int(zeros.flatten()[0])
    return first if bool((zeros == first).all()) else None


def _signed(codes: Tensor, offset: int) -> Tensor:
    return (codes.to(torch.int16) - offset).to(torch.int8)


def _is_finite(scales: Tensor) -> bool:
    return bool(scales.to(torch.float32).isfinite().all())
