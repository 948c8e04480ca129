"""Products with weight matrices [outputs, inputs] in their fastest layouts, embedding lookups, and einsum."""

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.ops.operator import autocast_dtype, autocast_to, check_no_gradient, no_autocast, shapes
from onward.ops.packed import NativeWeight, native_linear, pack_native
from onward.ops.quantized import QuantizedWeight, quantized_linear

Weight = Tensor | NativeWeight | QuantizedWeight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: float [..., K].
        weight: float [N, K] of x's dtype, the result of `pack` of it, or a `QuantizedWeight`.
        bias: float [N], of x's dtype, or None.

    Returns:
        [..., N] in x's dtype.

    Raises:
        RequestError: shapes or dtypes that don't match.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        with no_autocast(x):
            return _linear_under_autocast(dtype, x, weight, bias)
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias)
    rows, inputs, dtype = _shape_and_dtype(weight)
    bias_fits = bias is None or (bias.shape == (rows,) and bias.dtype == dtype)
    if x.shape[-1:] != (inputs,) or x.dtype != dtype or not bias_fits:
        raise RequestError(
            f"linear: a weight {dtype} {[rows, inputs]} expects x [..., {inputs}] and a bias [{rows}] or none, of its "
            f"dtype; got {shapes(x=x, bias=bias)}"
        )
    if isinstance(weight, NativeWeight):
        return native_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def _linear_under_autocast(dtype: torch.dtype, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):
        x, weight, bias = autocast_to(dtype, x, weight, bias)
    elif not isinstance(weight, QuantizedWeight):
        # The weight was packed once for all calls, so the product is computed in the dtype it was packed in.
        x, bias = autocast_to(_shape_and_dtype(weight)[2], x, bias)
    out: Tensor = autocast_to(dtype, linear(x, weight, bias))[0]
    return out


def pack(weight: Weight) -> Weight:
    """The weight [N, K] in the layout that this machine's `linear` reads fastest: a copy, detached from autograd, or
    the weight itself if no layout is faster.

    Raises:
        RequestError: autograd follows the weight.
    """
    if not isinstance(weight, Tensor):
        return weight
    check_no_gradient("ops.pack", "pack weight.detach()", weight)
    return pack_native(weight) or weight


def stock_weight(weight: Weight) -> Tensor:
    """A float weight [N, K] in rows, as a checkpoint has it: a copy of a packed one."""
    assert not isinstance(weight, QuantizedWeight), "its floats are rounded already"
    return weight.unpack() if isinstance(weight, NativeWeight) else weight


def weight_shape(weight: Weight) -> tuple[int, int]:
    """(N, K) of a weight in any layout."""
    return weight.shape if isinstance(weight, QuantizedWeight) else _shape_and_dtype(weight)[:2]


def _shape_and_dtype(weight: Tensor | NativeWeight) -> tuple[int, int, torch.dtype]:
    """(N, K, dtype) of a float weight in any layout."""
    if isinstance(weight, NativeWeight):
        return weight.rows, weight.inputs, weight.data.dtype
    if weight.dim() != 2:
        raise RequestError(f"linear: a weight must be [N, K]; got {shapes(weight=weight)}")
    return weight.shape[0], weight.shape[1], weight.dtype


Table = Tensor | NativeWeight | QuantizedWeight


def embedding(tokens: Tensor, table: Table) -> Tensor:
    """Rows of a table [V, D] (a tensor, packed or quantized) for ids int [B, T]: [B, T, D] in the table's dtype."""
    if isinstance(table, QuantizedWeight):
        return table.rows(tokens)
    return table.take(tokens) if isinstance(table, NativeWeight) else F.embedding(tokens, table)


def einsum(subscripts: str, *operands: Tensor) -> Tensor:
    """Products summed over the indices that are not in the result of `subscripts`, such as j of "bij,bjk->bik".

    Three operands or more are contracted pair by pair: in an optimised order if opt_einsum is installed (torch uses
    it), else from left to right. The results differ in rounding only.

    Args:
        subscripts: as in `torch.einsum`: letters, "...", repeated indices for diagonals.
        operands: at least one, of one dtype.

    Raises:
        RequestError: subscripts that don't match the operands.
    """
    if not operands:
        raise RequestError(f"einsum {subscripts!r} expects at least one operand; got none")
    try:
        return torch.einsum(subscripts, *operands)
    except (RuntimeError, ValueError) as error:
        operand_shapes = ", ".join(str(list(t.shape)) for t in operands)
        raise RequestError(f"einsum {subscripts!r} does not fit operands {operand_shapes}: {error}") from error
