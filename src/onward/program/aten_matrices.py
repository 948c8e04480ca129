"""Rules for torch's products, attention, norms, reductions and lookups."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onward.errors import ProgramError
from onward.native.generic import (
    Reduce,
    onward_cumsum,
    onward_gather_rows,
    onward_index,
    onward_matmul,
    onward_reduce,
    onward_softmax,
)
from onward.ops.attention import call_attention
from onward.ops.kernel_calls import Unsupported, broadcast_strides
from onward.ops.norm import call_layer_norm, call_rms_norm
from onward.program.aten_pointwise import broadcast_shapes, choose, empty_meta
from onward.program.builder import INFER, Builder, element_code, lowers, named_arguments
from onward.program.graph import Array, Node, address

aten = torch.ops.aten


# ── products ──────────────────────────────────────────────────────────────────────────────────────────────────


@lowers(aten.linear.default)
def linear(b: Builder, node: Node) -> None:
    x, weight, bias = named_arguments(node).values()
    if len(weight.shape) != 2:
        raise Unsupported("a weight that is not a matrix")
    _matrix_product(b, x, weight.permuted((1, 0)), node.outputs[0], bias)


def _matrix_product(b: Builder, x: Array, y: Array, out: Array, bias: Array | None = None) -> None:
    """x [..., K] @ y [K, N], as one product of matrices."""
    x = b.matrix(x)
    product(b, x, y, out.reshaped((x.shape[0], out.shape[-1])), bias)


@lowers(aten.matmul.default, aten.mm.default, aten.bmm.default)
def matmul(b: Builder, node: Node) -> None:
    x, y = node.args
    out = node.outputs[0]
    if len(x.shape) < 2 or len(y.shape) < 2:
        raise Unsupported("a product with a vector")
    if len(y.shape) == 2 and len(x.shape) > 2:
        _matrix_product(b, x, y, out)
    else:
        product(b, x, y, out)


@lowers(aten.addmm.default, aten.baddbmm.default)
def addmm(b: Builder, node: Node) -> None:
    bias, x, y, beta, alpha = named_arguments(node).values()
    if node.op is aten.baddbmm.default and len([s for s in bias.shape if s > 1]) > 2:
        raise Unsupported("a bias for each matrix of a batch")
    product(b, x, y, node.outputs[0], bias, alpha, beta)


def product(
    b: Builder, x: Array, y: Array, out: Array, bias: Array | None = None, alpha: float = 1.0, beta: float = 1.0
) -> None:
    """out [..., M, N] = alpha * x [..., M, K] @ y [..., K, N] + beta * bias, with broadcast batch dimensions."""
    if not x.dtype == y.dtype == out.dtype or (bias is not None and bias.dtype != x.dtype):
        raise Unsupported("operands of different dtypes")
    batch, (m, n) = list(out.shape[:-2]), out.shape[-2:]
    x_steps, y_steps = (broadcast_strides(side, [*batch, *side.shape[-2:]]) for side in (x, y))
    bias_steps = [0, 0] if bias is None else broadcast_strides(bias, out.shape)[-2:]
    b.call(
        onward_matmul, len(batch), batch, m, n, x.shape[-1], address(x), x_steps[:-2], *x_steps[-2:],
        address(y), y_steps[:-2], *y_steps[-2:], None if bias is None else address(bias), *bias_steps,
        address(out), list(out.strides[:-2]), *out.strides[-2:], b.code(x), float(alpha), float(beta),
    )  # fmt: skip


@lowers(aten.scaled_dot_product_attention.default)
def attention(b: Builder, node: Node) -> None:
    q, k, v, mask, dropout, is_causal, scale, *_ = named_arguments(node).values()
    if dropout or len(q.shape) != 4 or k.shape[:-1] != v.shape[:-1] or q.shape[1] % k.shape[1]:
        raise Unsupported("dropout, or shapes other than [B, H, T, D]")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    offsets = None
    if is_causal:  # aligned to the top left
        if k.shape[2] < q.shape[2]:
            raise Unsupported("causal with fewer keys than queries")
        offsets = b.constant(torch.zeros(q.shape[0], dtype=torch.int32))
    if mask is not None:
        if mask.dtype == torch.bool:
            additive = b.trace.temporary(mask.shape, torch.float32)
            choose(b, mask, 0.0, -math.inf, additive)
            mask = additive
        mask = mask if mask.dtype == torch.float32 else b.cast(mask, torch.float32)
    call_attention(b, node.outputs[0], q, k, v, None, scale, 0, 0.0, offsets=offsets, mask=mask)


# ── norms, softmax, sums ──────────────────────────────────────────────────────────────────────────────────────


@lowers(aten.layer_norm.default)
def layer_norm(b: Builder, node: Node) -> None:
    x, shape, weight, bias, eps, *_ = named_arguments(node).values()
    if len(shape) != 1 or any(a is not None and a.dtype != x.dtype for a in (weight, bias)):
        raise Unsupported("more than the last axis, or weights of another dtype")
    call_layer_norm(b, node.outputs[0], x, weight, bias, eps)


@lowers(aten.rms_norm.default)
def rms_norm(b: Builder, node: Node) -> None:
    x, shape, weight, eps = named_arguments(node).values()
    if len(shape) != 1 or (weight is not None and weight.dtype != x.dtype):
        raise Unsupported("more than the last axis, or a weight of another dtype")
    call_rms_norm(b, node.outputs[0], x, weight, torch.finfo(x.dtype).eps if eps is None else eps)


@lowers(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default)
def softmax(b: Builder, node: Node) -> None:
    _along_dim(b, node, onward_softmax, "log" in node.op._schema.name)


@lowers(aten.cumsum.default)
def cumsum(b: Builder, node: Node) -> None:
    _along_dim(b, node, onward_cumsum)


def _along_dim(b: Builder, node: Node, kernel: str, *options: int) -> None:
    """Call a kernel that works along one dimension of its input."""
    x, dim = node.args[:2]
    out = node.outputs[0]
    dim %= max(len(x.shape), 1)
    outer = [i for i in range(len(x.shape)) if i != dim]
    b.call(
        kernel, *options, len(outer), [x.shape[i] for i in outer], x.shape[dim],
        address(x), element_code(x), [x.strides[i] for i in outer], x.strides[dim],
        address(out), element_code(out), [out.strides[i] for i in outer], out.strides[dim],
    )  # fmt: skip


_REDUCTIONS = {
    aten.sum.dim_IntList: Reduce.SUM,
    aten.sum.default: Reduce.SUM,
    aten.mean.dim: Reduce.MEAN,
    aten.mean.default: Reduce.MEAN,
    aten.amax.default: Reduce.MAX,
    aten.amin.default: Reduce.MIN,
    aten.argmax.default: Reduce.ARGMAX,
    aten.any.dim: Reduce.ANY,
    aten.all.dim: Reduce.ALL,
}


@lowers(*_REDUCTIONS)
def reduction(b: Builder, node: Node) -> None:
    x, out, arguments = node.args[0], node.outputs[0], named_arguments(node)
    dims = _dims(arguments.get("dim"), len(x.shape))
    outer = [i for i in range(len(x.shape)) if i not in dims]
    steps = [out.strides[i] for i in outer] if arguments.get("keepdim") else list(out.strides)
    b.call(
        onward_reduce, _REDUCTIONS[node.op], len(outer), [x.shape[i] for i in outer], len(dims),
        [x.shape[i] for i in dims], address(x), element_code(x), [x.strides[i] for i in outer],
        [x.strides[i] for i in dims], address(out), element_code(out), steps,
    )  # fmt: skip


def _dims(dim: Any, count: int) -> list[int]:
    if dim is None or dim == []:
        return list(range(count))
    return sorted(d % count for d in (dim if isinstance(dim, Sequence) else [dim]))


# ── lookups ───────────────────────────────────────────────────────────────────────────────────────────────────


@lowers(aten.embedding.default)
def embedding(b: Builder, node: Node) -> None:
    table, ids = node.args[:2]
    out = node.outputs[0]
    if len(table.shape) != 2 or table.strides[1] != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise Unsupported("a table whose rows are not contiguous, or ids that are not int32 or int64")
    ids = b.contiguous(ids)
    b.call(
        onward_gather_rows, ids.numel, table.shape[1], b.code(table), address(table), table.shape[0],
        table.strides[0], address(ids), ids.dtype == torch.int64, address(out), table.shape[1],
    )  # fmt: skip


INFER[aten.embedding.default] = lambda table, ids, *_: empty_meta((*ids.shape, table.shape[1]), table.dtype)


@lowers(aten.index.Tensor)
def index(b: Builder, node: Node) -> None:
    x, indices = node.args
    advanced_index(b, x, indices, node.outputs[0], put=False)


@lowers(aten.index_put_.default, aten.index_put.default)
def index_put(b: Builder, node: Node) -> None:
    x, indices, values, accumulate = named_arguments(node).values()
    if accumulate:
        raise Unsupported("accumulate=True")
    if node.op is aten.index_put.default:
        b.copy(x, node.outputs[0])
        x = node.outputs[0]
    advanced_index(b, x, indices, values, put=True)


def advanced_index(b: Builder, x: Array, indices: Sequence[Array | None], other: Array, put: bool) -> None:
    """other = x[indices], or with put x[indices] = other, with numpy's order of dims."""
    arrays = [index for index in indices if index is not None]
    if any(index.dtype not in (torch.int32, torch.int64) for index in arrays):
        raise Unsupported("an index that is neither int32 nor int64")
    before, index_shape, after = index_dims(len(x.shape), indices)
    shape = [x.shape[i] for i in before] + index_shape + [x.shape[i] for i in after]
    steps = [x.strides[i] for i in before] + [0] * len(index_shape) + [x.strides[i] for i in after]
    words: list[Any] = []
    for i, index in enumerate(indices):
        if index is not None:
            index_steps = [0] * len(before) + broadcast_strides(index, index_shape) + [0] * len(after)
            words += [address(index), element_code(index), x.strides[i], x.shape[i], *index_steps]
    if put and other.dtype != x.dtype:
        other = b.cast(other, x.dtype)
    b.call(
        onward_index, len(shape), shape, address(other), broadcast_strides(other, shape), address(x), x.dtype.itemsize,
        steps, len(arrays), words, put,
    )  # fmt: skip


def index_dims(count: int, indices: Sequence[Any]) -> tuple[list[int], list[int], list[int]]:
    """The dims of x[indices], for x of `count` dims: dims of x, the shape of the broadcast indices, dims of x."""
    used = [i for i, index in enumerate(indices) if index is not None]
    # Adjacent indexed dims stay in place; otherwise they come first.
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    others = [i for i in range(count) if i not in used]
    return others[:first], list(broadcast_shapes([indices[i] for i in used])), others[first:]


def _infer_index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        raise ProgramError("the forward indexes with a mask: the shape of the result depends on values")
    before, index_shape, after = index_dims(x.dim(), indices)
    return empty_meta([x.shape[i] for i in before] + index_shape + [x.shape[i] for i in after], x.dtype)


INFER[aten.index.Tensor] = _infer_index


@lowers(aten.index_select.default)
def index_select(b: Builder, node: Node) -> None:
    x, dim, index = node.args
    indices: list[Array | None] = [None] * len(x.shape)
    indices[dim % len(x.shape)] = index
    advanced_index(b, x, indices, node.outputs[0], put=False)


@lowers(aten.gather.default)
def gather(b: Builder, node: Node) -> None:
    x, dim, index = node.args[:3]
    out = node.outputs[0]
    dim %= len(x.shape)
    steps = [0 if i == dim else x.strides[i] for i in range(len(x.shape))]
    words = [address(index), element_code(index), x.strides[dim], x.shape[dim], *index.strides]
    b.call(
        onward_index, len(index.shape), list(index.shape), address(out), list(out.strides), address(x),
        x.dtype.itemsize, steps, 1, words, False,
    )  # fmt: skip
