"""Round a matrix column by column, and compensate each column's error in later columns (GPTQ, arXiv 2210.17323).

It minimises the error of the outputs on sample inputs: tr(E H E^T), with E = W - W' and the Hessian H = X^T X of the
inputs X [T, K]. The format of scales is unchanged.

Shapes: N rows (outputs), K inputs, T tokens.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.ops import quantized_layout as layout
from onward.ops.quantized import QuantizedWeight
from onward.quantization.rounding import CODEBOOKS, Codebook, extremes, quantize_and_measure, relative_rms_error

# Added to the diagonal of H, relative to its mean, as in the paper; ten times as much while H is not yet definite.
_DAMPING = 0.01
_REFINEMENTS = 2  # scales tried per place of a group's extreme: its own, and the least-squares scale of the result
# Rows that are rounded together. Rows are independent, so this bounds memory and changes nothing.
_ROWS = 8192
_MAX_SCALE = torch.finfo(torch.float16).max
# Its scales are not searched.
_INT8 = Codebook(lambda quotients: quotients.round_().clamp_(-127, 127), lambda values: values.to(torch.int8))


class RoundingResult(NamedTuple):
    """A quantized weight, its relative RMS error, and `relative_output_error` on the inputs of the Hessian."""

    weight: QuantizedWeight
    relative_rms_error: float
    relative_output_error: float


def quantize_with_feedback(weight: Tensor, hessian: Tensor, format: str) -> RoundingResult:
    """Quantize for small errors of the outputs on the inputs of `hessian`.

    Groups of 32 are rounded by their inputs' energy, greatest first, and so are the inputs in a group. A group's scale
    is chosen just before, for the weights as corrected so far. The result is that of rounding to nearest if its error
    is smaller.

    Args:
        weight: float [N, K], finite.
        hessian: float32 [K, K], X^T X of inputs X, up to a factor.
        format: "int8", "int4" or "iq4_nl".

    Raises:
        RequestError: as for `quantize_weight`, or a Hessian that has another size or is not finite.
    """
    nearest, error = quantize_and_measure(weight, format)
    rows, inputs = nearest.shape
    if hessian.shape != (inputs, inputs) or not bool(hessian.isfinite().all()):
        raise RequestError(
            f"a weight {[rows, inputs]} expects a finite Hessian {[inputs, inputs]} of its inputs; "
            f"got {list(hessian.shape)}{'' if hessian.isfinite().all() else ' with infinities or NaNs'}"
        )
    size = _energy(weight, hessian)
    result = RoundingResult(nearest, error, _relative(_error_energy(weight, nearest, hessian), size))
    order = _order(hessian.diagonal(), inputs if format == "int8" else layout.GROUP)
    factor = _inverse_factor(hessian[order][:, order])
    if factor is None:
        return result
    parts = [_rounded(part, factor, order, format) for part in torch.split(weight, _ROWS)]
    q, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    corrected = QuantizedWeight.pack(format, q, scales, weight.dtype)
    output_error = _relative(_error_energy(weight, corrected, hessian), size)
    if not output_error < result.relative_output_error:
        return result
    return RoundingResult(corrected, relative_rms_error(weight, corrected), output_error)


def relative_output_error(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor) -> float:
    """sqrt(tr(E H E^T) / tr(W H W^T)): the relative RMS error of the outputs; 0 if they are all zeros."""
    return _relative(_error_energy(weight, quantized, hessian), _energy(weight, hessian))


def _relative(error: float, size: float) -> float:
    return math.sqrt(max(error, 0.0) / size) if size > 0 else 0.0


def _error_energy(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor) -> float:
    """tr(E H E^T)."""
    values = quantized.dequantize()
    return sum(
        _energy(stock.to(torch.float32) - rounded.to(torch.float32), hessian)
        for stock, rounded in zip(torch.split(weight, _ROWS), torch.split(values, _ROWS), strict=True)
    )


def _energy(weight: Tensor, hessian: Tensor) -> float:
    """tr(W H W^T)."""
    parts = (part.to(torch.float32) for part in torch.split(weight, _ROWS))
    return sum(float(((part @ hessian) * part).sum(dtype=torch.float64)) for part in parts)


def _order(energy: Tensor, group: int) -> Tensor:
    """int64 [K]: the inputs in the order of rounding; groups stay together."""
    groups = torch.split(energy, group)
    first = torch.stack([part.mean() for part in groups]).argsort(descending=True, stable=True)
    within = [part.argsort(descending=True, stable=True) + index * group for index, part in enumerate(groups)]
    return torch.cat([within[index] for index in first.tolist()])


def _inverse_factor(hessian: Tensor) -> Tensor | None:
    """The upper triangular U with U^T U = H^-1, of the damped H; None if the inputs were all zeros."""
    mean = float(hessian.diagonal().mean())
    damping = _DAMPING * mean
    while mean > 0 and damping < 1e4 * mean:
        damped = hessian.clone()
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping *= 10
    return None


def _rounded(weight: Tensor, factor: Tensor, order: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """The integers, int8 [N, K], and the scales of some rows. factor: of the inputs in `order`."""
    left = weight.to(torch.float32).T[order]  # [K, N]: an input's weights are contiguous
    codes = torch.empty_like(left, dtype=torch.int8)
    inputs, rows = left.shape
    codebook = _INT8 if format == "int8" else CODEBOOKS[format]
    scales = left.new_zeros(layout.num_groups(format, inputs), rows)
    if format == "int8":
        scales[0] = left.abs().amax(0) / 127
    for begin, end, group in _runs(order, format):
        block = left[begin:end]
        if format != "int8":
            scales[group] = _scales(block, factor.diagonal()[begin:end], codebook)
        scale = scales[group]
        reciprocal = torch.where(scale == 0, 0.0, 1 / scale)
        errors = torch.empty_like(block)
        for index in range(end - begin):
            row = factor[begin + index, begin + index : end]
            values = codebook.nearest(block[index] * reciprocal)
            errors[index] = (block[index] - values * scale) / row[0]
            block[index + 1 :] -= row[1:, None] * errors[index]
            block[index] = values
        codes[begin:end] = codebook.codes(block)
        left[end:].addmm_(factor[begin:end, end:].T, errors, alpha=-1)
    stored = scales.T.contiguous().to(torch.float32 if format == "int8" else torch.float16)
    return codes[order.argsort()].T.contiguous(), stored


def _runs(order: Tensor, format: str) -> list[tuple[int, int, int]]:
    """(first, one past the last, group of the scales) of each run of inputs that is rounded at once."""
    runs, begin, inputs = [], 0, len(order)
    while begin < inputs:
        group = 0 if format == "int8" else int(order[begin]) // layout.GROUP
        end = begin + min(layout.GROUP, inputs - (begin if format == "int8" else group * layout.GROUP))
        runs.append((begin, end, group))
        begin = end
    return runs


def _scales(block: Tensor, factor: Tensor, codebook: Codebook) -> Tensor:
    """The scale [N], rounded to float16, with the least sum of (w - s q)² / u² over a group float32 [inputs, N]: GPTQ
    counts the error of an input that later inputs can't compensate."""
    weights = factor.square().reciprocal_().unsqueeze(1)
    weights = weights / weights.amax()
    extreme = extremes(block)
    best = torch.zeros_like(extreme)
    best_error = torch.full_like(extreme, torch.inf)

    def keep_if_better(scale: Tensor) -> Tensor:
        """Return the least-squares scale of the values that this one rounds to."""
        nonlocal best, best_error
        stored = scale.clamp(-_MAX_SCALE, _MAX_SCALE).to(torch.float16).to(torch.float32)
        q = codebook.rounded(block, stored)
        error = ((block - q * stored).square_() * weights).sum(0)
        better = error < best_error
        best, best_error = torch.where(better, stored, best), torch.where(better, error, best_error)
        weighted = q * weights
        size = (weighted * q).sum(0)
        return torch.where(size == 0, 0.0, (weighted * block).sum(0) / size.clamp_min(1e-30))

    for place in codebook.places:
        scale = extreme / place
        for _ in range(_REFINEMENTS):
            scale = keep_if_better(scale)
    return best
