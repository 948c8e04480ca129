"""The product of each head's features with a matrix of its own: a block diagonal matrix, stored as its blocks.

Shapes: H heads, each of K inputs and N outputs.
"""

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.native.interface import Code, Int, Pointer, kernel
from onward.ops.expert_weights import NativeExperts
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand
from onward.ops.operator import Backward, Gradients, Operator, autocast_dtype, autocast_to, no_autocast, shapes
from onward.ops.packed import FORMATS, NativeWeight, packed_view

HeadWeights = Tensor | NativeExperts


def linear_by_head(x: Tensor, weight: HeadWeights) -> Tensor:
    """out[..., h, :] = weight[h] @ x[..., h, :].

    Args:
        x: float [..., H, K].
        weight: float [H, N, K] of x's dtype, or `pack_experts` of it.

    Returns:
        [..., H, N] in x's dtype. With a packed weight a head's bits depend on its own inputs alone, and are those of
        `linear`.

    Raises:
        RequestError: shapes or dtypes that don't match.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        with no_autocast(x):
            if isinstance(weight, NativeExperts):
                return linear_by_head(x.to(weight.dtype), weight).to(dtype)
            return linear_by_head(*autocast_to(dtype, x, weight))
    shape = tuple(weight.shape)
    if len(shape) != 3 or x.shape[-2:] != (shape[0], shape[2]) or x.dtype not in DTYPES or x.dtype != weight.dtype:
        raise RequestError(
            f"linear_by_head: a weight [H, N, K] expects x [..., H, K] of its dtype; got {shapes(x=x)}, weight "
            f"{weight.dtype} {list(shape)}"
        )
    if isinstance(weight, NativeExperts):
        return _packed_linear_by_head(x, weight.data, weight.rows, weight.inputs)
    return torch.einsum("...hk,hnk->...hn", x, weight)


def _definition(x: Tensor, data: Tensor, rows: int, inputs: int) -> Tensor:
    weight = torch.stack([NativeWeight(matrix, rows, inputs).unpack() for matrix in data])
    return torch.einsum("...hk,hnk->...hn", x, weight)


def _gradient(backward: Backward, x: Tensor, data: Tensor, rows: int, inputs: int) -> Gradients:
    grad, to_x, to_data = backward.grad, None, None
    if backward.needs[0]:
        weight = NativeExperts(data, rows, inputs).unpack()
        to_x = torch.einsum("...hn,hnk->...hk", grad, weight)
    if backward.needs[1]:
        by_head = (part.reshape(-1, *part.shape[-2:]).transpose(0, 1) for part in (grad, x))  # [H, tokens, …]
        to_data = packed_view(next(by_head).mT @ next(by_head))
    return to_x, to_data


@kernel
def onward_linear_by_head(
    format: Code, t: Int, heads: Int, n: Int, k: Int, x: Pointer, x_dtype: Code, x_stride: Int, x_head_stride: Int,
    packed: Pointer, out: Pointer, out_dtype: Code, out_stride: Int, out_head_stride: Int,
) -> Code: ...  # fmt: skip


def _call(k: KernelCalls, out: Operand, x: Operand, data: Operand, rows: int, inputs: int) -> None:
    heads = data.shape[0]
    x, vectors, _, step = k.rows(x)
    k.call(
        onward_linear_by_head, FORMATS[data.dtype], vectors // heads, heads, rows, inputs, k.address(x), k.code(x),
        heads * step, step, k.optional(data), k.address(out), k.code(out), heads * rows, rows,
    )  # fmt: skip


_packed_linear_by_head: Operator[Tensor] = Operator(
    "packed_linear_by_head(Tensor x, Tensor data, int rows, int inputs) -> Tensor",
    _definition, _call, lambda x, data, rows, inputs: x.new_empty((*x.shape[:-1], rows)), gradient=_gradient,
)  # fmt: skip
