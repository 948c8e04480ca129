"""Normalisation over the last axis: root mean square (Zhang & Sennrich, arXiv 1910.07467) and layer norm
(Ba et al., arXiv 1607.06450)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native.interface import Code, Float, Int, Pointer, kernel
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand
from onward.ops.operator import (
    Backward,
    Gradients,
    Operator,
    autocast_dtype,
    autocast_norm,
    like_first,
    no_autocast,
    shapes,
)


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0, after_cast: bool | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) in float32, times offset + weight.

    Families differ in where they round. Llama and Qwen cast the quotient back to x's dtype first and THEN multiply.
    Gemma, which learns 1 + w, and OLMo compute all of it in float32 and cast back once.

    Args:
        x: float [..., D].
        weight: float [D], of x's dtype.
        eps: added to the mean square.
        offset: added to the weight.
        after_cast: multiply after the cast; by default if offset is 0, as it must be for this.

    Returns:
        [..., D] in x's dtype.
    """
    if autocast_dtype(x) is not None:
        with no_autocast(x):
            return autocast_norm(lambda *t: rms_norm(*t, eps=eps, offset=offset, after_cast=after_cast), x, weight)
    _check("rms_norm", x, weight)
    if after_cast and offset:
        raise RequestError(
            f"rms_norm: after_cast requires offset 0, since the weight is multiplied as it is; got {offset}"
        )
    return _rms_norm(x, weight, float(eps), float(offset), not offset if after_cast is None else bool(after_cast))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias in float32, cast back once.

    Args:
        x: float [..., D].
        weight, bias: float [D], of x's dtype.
        eps: added to the (biased) variance.

    Returns:
        [..., D] in x's dtype.
    """
    if autocast_dtype(x) is not None:
        with no_autocast(x):
            return autocast_norm(lambda *t: layer_norm(*t, eps=eps), x, weight, bias)
    _check("layer_norm", x, weight, bias)
    return _layer_norm(x, weight, bias, float(eps))


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float, after_cast: bool) -> Tensor:
    """The definition, written out."""
    x_float = x.to(torch.float32)
    normed = x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    if after_cast:
        return normed.to(x.dtype) * weight
    return (normed * (offset + weight.to(torch.float32))).to(x.dtype)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The definition, written out."""
    x_float = x.to(torch.float32)
    centred = x_float - x_float.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(torch.float32) + bias.to(torch.float32)).to(x.dtype)


def _rms_norm_definition(x: Tensor, weight: Tensor, eps: float, offset: float, after_cast: bool) -> Tensor:
    """`rms_norm_reference` in fewer calls: torch's norm without a weight computes in float32 and casts back once."""
    if after_cast:
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    return rms_norm_reference(x, weight, eps, offset, after_cast)


# x is first added to the residual, and the sum stored, if there is one. weight: or None.
@kernel
def onward_rms_norm(
    rows: Int, columns: Int, dtype: Code, x: Pointer, x_stride: Int, residual: Pointer, residual_stride: Int,
    sum: Pointer, sum_stride: Int, weight: Pointer, weight_offset: Float, after_cast: Code, eps: Float, out: Pointer,
    out_stride: Int,
) -> Code: ...  # fmt: skip
@kernel
def onward_layer_norm(
    rows: Int, columns: Int, dtype: Code, x: Pointer, x_stride: Int, residual: Pointer, residual_stride: Int,
    sum: Pointer, sum_stride: Int, weight: Pointer, bias: Pointer, eps: Float, out: Pointer, out_stride: Int,
) -> Code: ...  # fmt: skip


def call_rms_norm(
    k: KernelCalls, out: Operand, x: Operand, weight: Operand | None, eps: float, offset: float = 0.0,
    after_cast: bool = True, *, terms: tuple[Operand, Operand] | None = None,
) -> None:  # fmt: skip
    """terms: two contiguous tensors whose sum the call stores in x before it takes the norm."""
    k.call(
        onward_rms_norm, *_input(k, x, terms), k.optional(weight), offset, after_cast, eps,
        k.address(out), out.shape[-1],
    )  # fmt: skip


def call_layer_norm(
    k: KernelCalls, out: Operand, x: Operand, weight: Operand | None, bias: Operand | None, eps: float, *,
    terms: tuple[Operand, Operand] | None = None,
) -> None:  # fmt: skip
    """terms: as in `call_rms_norm`."""
    k.call(
        onward_layer_norm, *_input(k, x, terms), k.optional(weight), k.optional(bias), eps,
        k.address(out), out.shape[-1],
    )  # fmt: skip


def _input(k: KernelCalls, x: Operand, terms: tuple[Operand, Operand] | None) -> tuple[Any, ...]:
    """The kernels' first arguments, up to the stride of the sum."""
    rows_of_x, rows, columns, stride = k.rows(x)
    size = rows, columns, k.code(x)
    if terms is None:
        return *size, k.address(rows_of_x), stride, None, 0, None, 0
    left, right = terms
    return *size, k.address(left), columns, k.address(right), columns, k.address(x), columns


def _check(name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    wrong = [t for t in (weight, bias) if t is not None and (t.shape != x.shape[-1:] or t.dtype != x.dtype)]
    if wrong or x.dim() == 0 or x.dtype not in DTYPES:
        operands = "float x [..., D] with a weight [D] of its dtype" + ("" if bias is None else ", and such a bias")
        raise RequestError(f"{name} expects {operands}; got {shapes(x=x, weight=weight, bias=bias)}")


def _rms_norm_gradient(
    backward: Backward, x: Tensor, weight: Tensor, eps: float, offset: float, after_cast: bool
) -> Gradients:
    """r h - x r^3 mean(h x) and the sum of r x grad over rows, with r = 1 / rms(x) and h = grad * (offset + weight)."""
    width = x.shape[-1]
    grad, x_float = (each.to(torch.float32).reshape(-1, width) for each in (backward.grad, x))
    factors = weight.to(torch.float32) + offset
    r = (torch.linalg.vector_norm(x_float, dim=-1).square_() / width).add_(eps).rsqrt_()
    products = grad * x_float
    to_x = to_weight = None
    if backward.needs[0]:
        shift = torch.mv(products, factors).mul_(r.pow(3)).div_(-width)
        to_x = (grad * factors).mul_(r.unsqueeze(1)).addcmul_(x_float, shift.unsqueeze(1)).to(x.dtype).view(x.shape)
    if backward.needs[1]:
        to_weight = torch.mv(products.T, r).to(weight.dtype)
    return to_x, to_weight


_rms_norm = Operator(
    "rms_norm(Tensor x, Tensor weight, float eps, float offset, bool after_cast) -> Tensor",
    _rms_norm_definition, call_rms_norm, like_first, gradient=_rms_norm_gradient,
)  # fmt: skip
_layer_norm = Operator(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
    layer_norm_reference, call_layer_norm, like_first,
)  # fmt: skip
