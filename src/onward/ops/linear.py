"""The product with a weight matrix of one row an output, and the layouts in which the product is fastest."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.ops.autocast import autocast_dtype, lowered, off
from onward.ops.operators import check_no_gradient, may_want_gradient, shapes
from onward.ops.packed import NativeWeight, native_linear, pack_native
from onward.ops.quantized import QuantizedWeight, quantized_linear


class OneDnnWeight(NamedTuple):
    """A weight [N, K] in the blocked layout of torch's own CPU product, for machines without the native library.

    Torch reorders a row-major weight, or reads it badly, on every call: at one token that costs half of the memory
    bandwidth (benchmarks/LOG.md). This layout serves every number of tokens.
    """

    blocks: Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # torch can neither copy nor pickle its blocked layouts. So the stock weight travels and is packed again.
        return _pack_onednn, (self.blocks.to_dense(),)


PackedWeight = NativeWeight | OneDnnWeight
Weight = Tensor | NativeWeight | OneDnnWeight | QuantizedWeight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: float [..., K].
        weight: float [N, K] of x's dtype, the result of `pack` of it, or a `QuantizedWeight`.
        bias: float [N], of x's dtype, or None.

    Returns:
        [..., N] in x's dtype.

    Raises:
        RequestError: shapes or dtypes that do not fit.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        with off(x):
            return _linear_under_autocast(dtype, x, weight, bias)
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias)
    rows, inputs, dtype = _shape_and_dtype(weight)
    bias_fits = bias is None or (bias.shape == (rows,) and bias.dtype == dtype)
    if x.shape[-1:] != (inputs,) or x.dtype != dtype or not bias_fits:
        raise RequestError(
            f"linear: a weight {dtype} {[rows, inputs]} wants x [..., {inputs}] and a bias [{rows}] or none, of its "
            f"dtype; got {shapes(x=x, bias=bias)}"
        )
    if isinstance(weight, NativeWeight):
        return native_linear(x, weight, bias)
    if isinstance(weight, OneDnnWeight):
        if may_want_gradient(x, weight.blocks, bias):  # torch's product in this layout has none
            return F.linear(x, weight.blocks.to_dense(), bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.blocks, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def _linear_under_autocast(dtype: torch.dtype, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):
        x, weight, bias = lowered(dtype, x, weight, bias)
    elif not isinstance(weight, QuantizedWeight):
        # The weight was packed once for all calls, so the product is computed in the dtype it was packed in.
        x, bias = lowered(_shape_and_dtype(weight)[2], x, bias)
    out: Tensor = lowered(dtype, linear(x, weight, bias))[0]
    return out


def pack(weight: Weight) -> Weight:
    """The weight [N, K] in the layout that this machine's `linear` reads fastest; itself where none is faster.

    A packed weight is a copy without a graph.

    Raises:
        RequestError: autograd follows the weight.
    """
    if not isinstance(weight, Tensor):
        return weight
    check_no_gradient("ops.pack", "pack weight.detach()", weight)
    return pack_native(weight) or _pack_onednn(weight)


def _pack_onednn(weight: Tensor) -> Weight:
    if not _onednn_supports(weight):
        return weight
    return OneDnnWeight(torch.ops.mkldnn._reorder_linear_weight(weight, 1))


def _onednn_supports(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.float32:
        return True
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return weight.dtype in supported and bool(supported[weight.dtype]())


def stock_weight(weight: Weight) -> Tensor:
    """A weight [N, K] that is not quantized, in rows, as a checkpoint has it: a copy of a packed one."""
    assert not isinstance(weight, QuantizedWeight), "its floats are rounded already"
    if isinstance(weight, NativeWeight):
        return weight.unpack()
    return weight.blocks.to_dense() if isinstance(weight, OneDnnWeight) else weight


def weight_shape(weight: Weight) -> tuple[int, int]:
    """(N, K) of a weight in any layout."""
    if isinstance(weight, QuantizedWeight):
        return weight.shape
    return _shape_and_dtype(weight)[:2]


def _shape_and_dtype(weight: Tensor | NativeWeight | OneDnnWeight) -> tuple[int, int, torch.dtype]:
    """(N, K, dtype) of a float weight in any layout."""
    if isinstance(weight, NativeWeight):
        return weight.rows, weight.inputs, weight.data.dtype
    stock = weight.blocks if isinstance(weight, OneDnnWeight) else weight
    if stock.dim() != 2:
        raise RequestError(f"linear: a weight must be [N, K]; got {shapes(weight=stock)}")
    return stock.shape[0], stock.shape[1], stock.dtype


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition: products and sums in float32, one rounding at the end."""
    y = x.to(torch.float32) @ weight.to(torch.float32).T
    return (y if bias is None else y + bias.to(torch.float32)).to(x.dtype)
