"""Round float matrices to 8 and 4 bits with scales, and measure the error."""

import math
from collections.abc import Iterator

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
from onward.quantization.scales import CODEBOOKS, best_scale


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
