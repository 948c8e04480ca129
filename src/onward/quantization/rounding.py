"""Round float matrices to 8 and 4 bits with scales, and measure the error: by a kernel, or as defined here, with a
search for the scale of a group of weights with the smallest error.

Shapes: G groups of 32 inputs are columns, [32, G], so that sums run over rows.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from onward.errors import OptionError, RequestError
from onward.native import Library, advise_huge_pages
from onward.native.interface import Code, Int, Pointer, kernel
from onward.ops import quantized_layout as layout
from onward.ops.kernel_calls import DTYPES
from onward.ops.operator import check_no_gradient, usable_library
from onward.ops.quantized import ROUNDED_FORMATS, QuantizedWeight, rounded_formats


def quantize_weight(weight: Tensor, format: str) -> QuantizedWeight:
    """`quantize_int8`, `quantize_int4` or `quantize_iq4_nl`, by the name of the format."""
    return quantize_and_measure(weight, format)[0]


def quantize_and_measure(weight: Tensor, format: str) -> tuple[QuantizedWeight, float]:
    """`quantize_weight`, and the `relative_rms_error` of the result."""
    check_format(format)
    _check_form(weight)
    check_no_gradient(f"rounding a weight to {format}", "round weight.detach()", weight)
    library = usable_library()
    if library is not None and weight.device.type == "cpu" and weight.dtype in DTYPES:
        return _quantize_native(library, weight, format)
    _check_values(weight, format, _largest(weight))
    quantized = definition(weight, format)
    return quantized, relative_rms_error(weight, quantized)


def check_format(format: str, option: str = "format") -> None:
    """Raise `OptionError` for an option that is not one of `ROUNDED_FORMATS`."""
    if format not in ROUNDED_FORMATS:
        raise OptionError(option, f"must be {rounded_formats()}; got {format!r}")


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Round each row to whole multiples, -127 … 127, of its absmax / 127.

    Rows of a thousand weights don't gain from a better scale: clipping their extremes costs more than finer steps gain,
    and a search changes the error by less than 2 % (docs/quantization.md).

    Args:
        weight: float [N, K], finite.

    Raises:
        RequestError: the weight is not a float matrix, is not finite, or has more than 65,536 inputs.
    """
    return quantize_weight(weight, "int8")


def quantize_int4(weight: Tensor) -> QuantizedWeight:
    """Round each group of 32 inputs of a row to whole multiples, -8 … 7, of the float16 scale with the smallest error.

    A search tries a grid of places for the group's extreme element, each improved by the least-squares scale of the
    integers, and the best by rounding to its scale again. The result is the scale with the least squared error, as
    stored, of these, absmax / 7 and Q4_0's rule. If K is not a multiple of 32 the last group of a row is shorter.

    Args:
        weight: float [N, K], finite, magnitudes up to 458,528 (7 times the largest float16).

    Raises:
        RequestError: the weight is not a float matrix, is not finite, is too large for a float16 scale, or has more
            than 65,536 inputs.
    """
    return quantize_weight(weight, "int4")


def quantize_iq4_nl(weight: Tensor) -> QuantizedWeight:
    """Round each group of 32 inputs of a row to multiples of a float16 scale: the 16 numbers of llama.cpp's IQ4_NL.

    They are denser near 0, as weights are: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113. The scale is
    searched as in `quantize_int4`, and no group is worse than with its extreme element at either end. A shorter last
    group is padded with zeros.

    Args:
        weight: float [N, K], finite, magnitudes up to 8,319,008 (127 times the largest float16).

    Raises:
        RequestError: as for `quantize_int4`.
    """
    return quantize_weight(weight, "iq4_nl")


@kernel
def onward_linear_quantize(
    format: Code, rows: Int, inputs: Int, x: Pointer, x_dtype: Code, x_stride: Int, packed: Pointer, sums: Pointer
) -> Code: ...


def _quantize_native(library: Library, weight: Tensor, format: str) -> tuple[QuantizedWeight, float]:
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    rows, inputs = weight.shape
    data = _empty(weight, format)
    sums = torch.empty((len(data), 3), dtype=torch.float64)
    status = library.onward_linear_quantize(
        ROUNDED_FORMATS[format], rows, inputs, weight.data_ptr(), DTYPES[weight.dtype], weight.stride(0),
        data.data_ptr(), sums.data_ptr(),
    )  # fmt: skip
    library.check(status, onward_linear_quantize)
    largest = float(sums[:, 2].max())  # NaN if a weight is NaN
    _check_values(weight, format, largest)
    error, size, _ = sums.sum(0).tolist()
    return QuantizedWeight(data, format, (rows, inputs), weight.dtype), math.sqrt(error / size) if size else 0.0


def definition(weight: Tensor, format: str) -> QuantizedWeight:
    """The kernel's computation in torch, for a checked weight."""
    data = _empty(weight, format)
    for blocks, part in _row_chunks(weight):
        data[blocks] = layout.pack(format, *(_int8(part) if format == "int8" else _grouped(part, format)))
    return QuantizedWeight(data, format, (weight.shape[0], weight.shape[1]), weight.dtype)


def _int8(part: Tensor) -> tuple[Tensor, Tensor]:
    scales = part.abs().amax(1, keepdim=True) / 127
    q = (part / scales).nan_to_num_(0.0).round_().clamp_(-127, 127)  # a row of zeros is 0 / 0
    return q.to(torch.int8), scales


def _grouped(part: Tensor, format: str) -> tuple[Tensor, Tensor]:
    (rows, inputs), codebook = part.shape, CODEBOOKS[format]
    groups = pad(part, (0, -inputs % layout.GROUP)).view(-1, layout.GROUP).T.contiguous()
    scale = best_scale(groups, codebook)
    codes = codebook.codes(codebook.rounded(groups, scale.to(torch.float32)))
    return codes.T.reshape(rows, -1)[:, :inputs].contiguous(), scale.view(rows, -1)


def relative_rms_error(weight: Tensor, quantized: QuantizedWeight) -> float:
    """sqrt(sum (w - w')² / sum w²), 0 for a matrix of zeros."""
    if quantized.shape != tuple(weight.shape):
        raise RequestError(
            f"a weight {list(weight.shape)} cannot be compared with a quantized one {list(quantized.shape)}"
        )
    error = size = 0.0
    for blocks, part in _row_chunks(weight):
        values = layout.values(quantized.format, quantized.data[blocks], quantized.shape[1])[: len(part)]
        error += float((part - values).square_().sum(dtype=torch.float64))
        size += float(part.square().sum(dtype=torch.float64))
    return math.sqrt(error / size) if size else 0.0


def _row_chunks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows with their values in float32 [some rows, K], few enough to stay in the processor's cache."""
    blocks = math.ceil(2**18 / (layout.BLOCK * weight.shape[1]))
    for first in range(0, math.ceil(len(weight) / layout.BLOCK), blocks):
        part = weight[first * layout.BLOCK : (first + blocks) * layout.BLOCK]
        yield slice(first, first + blocks), part.to(torch.float32).contiguous()


def _empty(weight: Tensor, format: str) -> Tensor:
    data = weight.new_empty(layout.data_shape(format, (weight.shape[0], weight.shape[1])), dtype=torch.uint8)
    if data.device.type == "cpu":
        advise_huge_pages(data.data_ptr(), data.nbytes)
    return data


def _largest(weight: Tensor) -> float:
    """The largest magnitude; NaN or infinite if a weight is."""
    return float(torch.stack([part.abs().amax() for _, part in _row_chunks(weight)]).amax())  # NaN wins


def _check_form(weight: Tensor) -> None:
    described = f"{weight.dtype} {list(weight.shape)}"
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise RequestError(f"a weight to quantize must be a float matrix [N, K]; got {described}")
    if weight.shape[1] > layout.MAX_INPUTS:
        raise RequestError(f"a weight to quantize can have at most {layout.MAX_INPUTS} inputs; got {described}")
    if weight.layout != torch.strided or weight.is_meta:
        raise RequestError(f"a weight to quantize must be a plain tensor; got {weight.layout} on {weight.device}")


def _check_values(weight: Tensor, format: str, largest: float) -> None:
    if not math.isfinite(largest):
        raise RequestError(
            f"a weight to quantize must be finite; {weight.dtype} {list(weight.shape)} contains an infinity or a NaN"
        )
    if format != "int8" and largest > CODEBOOKS[format].largest:
        raise RequestError(
            f"the scales of {format} are float16, for weights up to {CODEBOOKS[format].largest:.0f}; got one of "
            f"{largest:.6g}: use int8"
        )


# ── codebooks, and the search for a scale ─────────────────────────────────────────────────────────────────────

_REFINEMENTS = 2
# Below this magnitude a group's float16 scale is 0, and the reciprocal of its extreme could overflow.
_SMALLEST = 1e-30


class Codebook(NamedTuple):
    """The values that the weights of a group, divided by its scale, are rounded to.

    nearest: float32 [...] -> the nearest values; it may write to its argument. codes: the values -> int8, as
    `QuantizedWeight.pack` takes them. places: the search's candidates for a group's element of largest magnitude; it is
    clipped beyond the ends. plain: the candidates without a search, used unless the search is better.
    """

    nearest: Callable[[Tensor], Tensor]
    codes: Callable[[Tensor], Tensor]
    places: tuple[float, ...] = ()
    plain: tuple[float, ...] = ()

    @property
    def largest(self) -> float:
        """The magnitude of the largest weight with a float16 scale, by the first plain rule."""
        return abs(self.plain[0]) * torch.finfo(torch.float16).max

    def rounded(self, groups: Tensor, scale: Tensor) -> Tensor:
        """The values, as floats, of groups [inputs, G] rounded with a scale [G]; nearest to 0 for a scale of 0."""
        return self.nearest(groups * torch.where(scale == 0, 0.0, 1 / scale))


_TABLE = torch.tensor(layout.IQ4, dtype=torch.float32)
_MIN, _MAX = layout.IQ4[0], layout.IQ4[-1]
# Midpoints between values are multiples of 1/2, so x is rounded as ceil(2 x) / 2; a midpoint rounds down.
_NEAREST = _TABLE[torch.bucketize(torch.arange(2 * _MIN, 2 * _MAX + 1) / 2, (_TABLE[1:] + _TABLE[:-1]) / 2)]
_CODES = torch.bucketize(torch.arange(_MIN, _MAX + 1), _TABLE).to(torch.int8)


def _nearest_in_table(quotients: Tensor) -> Tensor:
    halves = quotients.mul_(2).nan_to_num_(0.0).ceil_().clamp_(2 * _MIN, 2 * _MAX).sub_(2 * _MIN)
    return _look_up(_NEAREST, halves)


def _look_up(table: Tensor, places: Tensor) -> Tensor:
    return table.to(places.device).index_select(0, places.to(torch.int64).flatten()).view(places.shape)


# A grid forty times as fine reduces the error by 0.05 to 0.4 % with int4, 0.1 to 0.3 % with iq4_nl
# (docs/quantization.md). Plain: absmax and the rule of llama.cpp's Q4_0; for the table either of its ends.
CODEBOOKS = {
    "int4": Codebook(
        lambda quotients: quotients.round_().clamp_(-8, 7),
        lambda values: values.to(torch.int8),
        places=(-9.5, -9.0, -8.5, -8.0, -7.5, -7.0, 6.0, 6.67, 7.33, 8.0),
        plain=(7.0, -8.0),
    ),
    "iq4_nl": Codebook(
        _nearest_in_table,
        lambda values: _look_up(_CODES, values - _MIN),
        places=(-145.0, -136.0, -127.0, -119.0, -110.0, -102.0, 90.0, 98.0, 106.0, 113.0, 121.0, 129.0),
        plain=(-127.0, 113.0),
    ),
}


def best_scale(groups: Tensor, codebook: Codebook) -> Tensor:
    """float32 [32, G] -> float16 [G]."""
    extreme = extremes(groups)
    best = (extreme / codebook.plain[0]).to(torch.float16)
    _, best_error = _with_scale(groups, best, codebook)

    def keep_if_better(scale: Tensor) -> Tensor:
        nonlocal best, best_error
        stored = scale.to(torch.float16)
        values, error = _with_scale(groups, stored, codebook)
        better = error < best_error  # false if the scale overflowed: then the error is NaN or infinite
        best, best_error = torch.where(better, stored, best), torch.where(better, error, best_error)
        return values

    keep_if_better(extreme / codebook.plain[1])
    values = keep_if_better(_search(groups, extreme, codebook))
    for _ in range(_REFINEMENTS):
        product, size = _moments(values, groups)
        values = keep_if_better(product / size)
    return best + 0  # no -0


def _search(groups: Tensor, extreme: Tensor, codebook: Codebook) -> Tensor:
    """The best least-squares scale [G] over the places of the codebook. With the scale sum(q x) / sum(q²) the error is
    sum(x²) - sum(q x)² / sum(q²): maximise the second term."""
    reciprocal = torch.where(extreme.abs() < _SMALLEST, 0.0, 1 / extreme)
    best_gain, best = torch.zeros_like(extreme), extreme / codebook.plain[0]
    for place in codebook.places:
        product, size = _moments(codebook.nearest(groups * (reciprocal * place)), groups)
        scale = product / size
        gain = product * scale
        better = gain > best_gain
        best_gain, best = torch.where(better, gain, best_gain), torch.where(better, scale, best)
    return best


def _moments(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """sum(q x) and sum(q²) of each group, the latter 1 if all values are 0."""
    return _sum(values * groups), _sum(values.square()).clamp_min_(1.0)


def _with_scale(groups: Tensor, stored: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """The values for a float16 scale [G], and the squared errors [G]."""
    scale = stored.to(torch.float32)
    values = codebook.rounded(groups, scale)
    return values, _sum((groups - values * scale).square_())


def extremes(groups: Tensor) -> Tensor:
    """The element of the largest magnitude of each group, with its sign: [inputs, G] -> [G]."""
    highest, lowest = groups.amax(0), groups.amin(0)
    return torch.where(highest >= -lowest, highest, lowest)


def _sum(terms: Tensor) -> Tensor:
    """[32, G] -> [G], from the first row to the last, as in the kernel, so that the bits agree."""
    total = terms[0].clone()
    for row in terms[1:]:
        total += row
    return total
