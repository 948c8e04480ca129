"""Round float matrices to integers with scales, and measure the error."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from onward.errors import RequestError
from onward.native import Library, advise_huge_pages
from onward.ops import quantized_layout as layout
from onward.ops.operators import DTYPES, usable_library
from onward.ops.quantized import ROUNDED_FORMATS, QuantizedWeight

# Scales that `quantize_int4` tries for a group: where the element of largest magnitude comes to lie. Beyond the ends
# -8 and 7 it is clipped. A grid forty times as fine errs 0.05 to 0.4 % less (docs/quantization.md).
INT4_PLACES = (-9.5, -9.0, -8.5, -8.0, -7.5, -7.0, 6.0, 6.67, 7.33, 8.0)
_REFINEMENTS = 2
# The places of rules that do not search: absmax and llama.cpp's Q4_0. They are kept where the search is not better.
_PLAIN = (7.0, -8.0)
_LARGEST_INT4 = 7 * torch.finfo(torch.float16).max
# Below this magnitude a group's float16 scale is 0, and the reciprocal of its extreme might overflow.
_SMALLEST_INT4 = 1e-30


def quantize_weight(weight: Tensor, format: str) -> QuantizedWeight:
    """`quantize_int8` or `quantize_int4`, by the name of the format."""
    return quantize_and_measure(weight, format)[0]


def quantize_and_measure(weight: Tensor, format: str) -> tuple[QuantizedWeight, float]:
    """`quantize_weight`, and the `relative_rms_error` of the result."""
    check_format(format)
    _check_form(weight)
    library = usable_library()
    if library is not None and weight.device.type == "cpu" and weight.dtype in DTYPES:
        return _quantize_native(library, weight, format)
    _check_values(weight, format, _largest(weight))
    quantized = _int8(weight) if format == "int8" else _int4(weight)
    return quantized, relative_rms_error(weight, quantized)


def check_format(format: str) -> None:
    """Raise unless it is "int8" or "int4"."""
    if format not in ROUNDED_FORMATS:
        raise RequestError(f"weights are quantized to {' or '.join(map(repr, ROUNDED_FORMATS))}; got {format!r}")


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Round each row to whole multiples, -127 … 127, of its absmax / 127.

    Rows of a thousand weights do not gain from a better scale: clipping their extremes costs more than finer steps
    gain, and searching changes the error by less than 2 % (docs/quantization.md).

    Args:
        weight: float [N, K], finite.

    Raises:
        RequestError: the weight is no float matrix, is not finite, or has more than 65,536 inputs.
    """
    return quantize_weight(weight, "int8")


def quantize_int4(weight: Tensor) -> QuantizedWeight:
    """Round each group of 32 inputs of a row to whole multiples, -8 … 7, of the float16 scale that errs least.

    A search tries a grid of places for the group's extreme element. The least-squares scale of the integers improves
    each of them, and the best is improved by rounding to its scale again. Of these, plain absmax / 7 and Q4_0's rule,
    the scale with the least squared error, as stored, is kept. Where K is no multiple of 32 the last group of a row is
    shorter.

    Args:
        weight: float [N, K], finite, magnitudes up to 458,528 (7 times the largest float16).

    Raises:
        RequestError: the weight is no float matrix, is not finite, is too large for a float16 scale, or has more than
            65,536 inputs.
    """
    return quantize_weight(weight, "int4")


def _quantize_native(library: Library, weight: Tensor, format: str) -> tuple[QuantizedWeight, float]:
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    rows, inputs = weight.shape
    data = _empty(weight, format)
    sums = torch.empty((len(data), 3), dtype=torch.float64)
    status = library.onward_linear_quantize(
        ROUNDED_FORMATS[format], rows, inputs, weight.data_ptr(), DTYPES[weight.dtype], weight.stride(0),
        data.data_ptr(), sums.data_ptr(),
    )  # fmt: skip
    library.check(status, "onward_linear_quantize")
    largest = float(sums[:, 2].max())  # NaN if a weight is NaN
    _check_values(weight, format, largest)
    error, size, _ = sums.sum(0).tolist()
    return QuantizedWeight(data, format, (rows, inputs), weight.dtype), math.sqrt(error / size) if size else 0.0


def _int8(weight: Tensor) -> QuantizedWeight:
    data = _empty(weight, "int8")
    for blocks, part in _row_chunks(weight):
        scales = part.abs().amax(1, keepdim=True) / 127
        q = (part / scales).nan_to_num_(0.0).round_().clamp_(-127, 127)  # a row of zeros is 0 / 0
        data[blocks] = layout.pack("int8", q.to(torch.int8), scales)
    return QuantizedWeight(data, "int8", (weight.shape[0], weight.shape[1]), weight.dtype)


def _int4(weight: Tensor) -> QuantizedWeight:
    inputs = weight.shape[1]
    data = _empty(weight, "int4")
    for blocks, part in _row_chunks(weight):
        rows = len(part)
        groups = pad(part, (0, -inputs % layout.GROUP)).view(-1, layout.GROUP).T.contiguous()
        q, scales = _best_int4(groups)
        data[blocks] = layout.pack("int4", q.T.reshape(rows, -1)[:, :inputs].contiguous(), scales.view(rows, -1))
    return QuantizedWeight(data, "int4", (weight.shape[0], inputs), weight.dtype)


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


def _best_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [32, G] -> int8 [32, G] and float16 [G]. Groups lie along the columns, so that sums run over rows."""
    extreme = extremes(groups)
    best_scale = (extreme / _PLAIN[0]).to(torch.float16)
    best_q, best_error = _with_scale(groups, best_scale)

    def keep_if_better(scale: Tensor) -> Tensor:
        nonlocal best_scale, best_q, best_error
        stored = scale.to(torch.float16)
        q, error = _with_scale(groups, stored)
        better = error < best_error  # false where the scale overflowed, for then the error is NaN
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, stored, best_scale)
        best_q = torch.where(better, q, best_q)
        return q

    for place in _PLAIN[1:]:
        keep_if_better(extreme / place)
    q = keep_if_better(_search(groups, extreme))
    for _ in range(_REFINEMENTS):
        product, size = _moments(q, groups)
        q = keep_if_better(product / size)
    return best_q.to(torch.int8), best_scale + 0  # no -0


def _search(groups: Tensor, extreme: Tensor) -> Tensor:
    """The best least-squares scale [G] over the places in `INT4_PLACES`.

    The scale sum(q x) / sum(q²) leaves the error sum(x²) - sum(q x)² / sum(q²): the second term is what to maximise.
    """
    reciprocal = torch.where(extreme.abs() < _SMALLEST_INT4, 0.0, 1 / extreme)
    best_gain, best_scale = torch.zeros_like(extreme), extreme / 7
    q = torch.empty_like(groups)
    for place in INT4_PLACES:
        torch.mul(groups, reciprocal * place, out=q).round_().clamp_(-8, 7)
        product, size = _moments(q, groups)
        scale = product / size
        gain = product * scale
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale


def _moments(q: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """sum(q x) and sum(q²) of each group, the latter 1 where all integers are 0."""
    return _sum(q * groups), _sum(q.square()).clamp_min_(1.0)


def _with_scale(groups: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """The integers (as floats) that a float16 scale [G] gives, and the squared errors [G]."""
    scale = stored.to(torch.float32)
    q = int4_integers(groups, scale)
    return q, _sum((groups - q * scale).square_())


def extremes(groups: Tensor) -> Tensor:
    """The element of the largest magnitude of each group, with its sign: [inputs, G] -> [G]."""
    highest, lowest = groups.amax(0), groups.amin(0)
    return torch.where(highest >= -lowest, highest, lowest)


def int4_integers(groups: Tensor, scale: Tensor) -> Tensor:
    """The integers (as floats) of groups [inputs, G] that a scale [G] gives: 0 where it is 0."""
    return (groups * torch.where(scale == 0, 0.0, 1 / scale)).round_().clamp_(-8, 7)


def _sum(terms: Tensor) -> Tensor:
    """[32, G] -> [G], from the first row to the last: in the kernel's order, so that the bits agree."""
    total = terms[0].clone()
    for row in terms[1:]:
        total += row
    return total


def _row_chunks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Whole blocks of rows with their values in float32 [some rows, K], few enough to stay in the processor's cache."""
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
    """The largest magnitude; NaN where a weight is infinite or NaN."""
    maxima = [part.abs().amax() for _, part in _row_chunks(weight)]
    largest = float(torch.stack(maxima).amax())  # NaN wins
    return largest if math.isfinite(largest) else math.nan


def _check_form(weight: Tensor) -> None:
    described = f"{weight.dtype} {list(weight.shape)}"
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise RequestError(f"a weight to quantize is a float matrix [N, K]; got {described}")
    if weight.shape[1] > layout.MAX_INPUTS:
        raise RequestError(f"a weight to quantize has at most {layout.MAX_INPUTS} inputs; got {described}")
    if weight.layout != torch.strided or weight.is_meta:
        raise RequestError(f"a weight to quantize is a plain tensor; got {weight.layout} on {weight.device}")


def _check_values(weight: Tensor, format: str, largest: float) -> None:
    if not math.isfinite(largest):
        raise RequestError(
            f"a weight to quantize is finite; {weight.dtype} {list(weight.shape)} holds an infinity or a NaN"
        )
    if format == "int4" and largest > _LARGEST_INT4:
        raise RequestError(
            f"the scales of int4 are float16, which serves weights up to {_LARGEST_INT4:.0f}; got one of "
            f"{largest:.6g}: use int8"
        )
