"""Infer the shapes and dtypes of operators that have a kernel.

torch has meta implementations of all of them, but most are written in Python, and the first call of one imports sympy,
which takes a second. Those of elementwise operators are in `aten_pointwise.py`, with their rules.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from onward.errors import ProgramError
from onward.program.aten_pointwise import broadcast_shapes, empty_meta
from onward.program.builder import INFER, infers

aten = torch.ops.aten


# ── products ──────────────────────────────────────────────────────────────────────────────────────────────────


@infers(aten.linear.default)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = _product(x, weight.mT if weight.dim() == 2 else weight.unsqueeze(-1))
    return product if weight.dim() == 2 else product.squeeze(-1)


@infers(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _product(x: Tensor, y: Tensor) -> Tensor:
    """[..., M, K] @ [..., K, N]; either may be a vector."""
    left: tuple[int, ...] = tuple(x.shape) if x.dim() > 1 else (1, *x.shape)
    right: tuple[int, ...] = tuple(y.shape) if y.dim() > 1 else (*y.shape, 1)
    if x.dtype != y.dtype or not x.dim() or not y.dim() or left[-1] != right[-2]:
        raise ProgramError(f"{x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)} have no matrix product")
    rows = left[-2:-1] if x.dim() > 1 else ()
    columns = right[-1:] if y.dim() > 1 else ()
    batch = broadcast_shapes([left[:-2], right[:-2]])
    return empty_meta((*batch, *rows, *columns), x.dtype)


@infers(aten.addmm.default, aten.baddbmm.default)
def _plus_product(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _product(x, y)
    _check_fits(bias, product)
    return product


@infers(aten.scaled_dot_product_attention.default)
def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
    """[B, H, T, D] over memory [B, T, H, D], as torch returns it."""
    if q.dim() != 4 or v.dim() != 4 or q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise ProgramError(
            f"attention expects q [B, H, T, D] and k and v [B, G, S, D]; got {list(q.shape)}, {list(k.shape)} and "
            f"{list(v.shape)}"
        )
    batch, heads, queries, _ = q.shape
    return empty_meta((batch, queries, heads, v.shape[-1]), q.dtype).transpose(1, 2)


# ── operators along dimensions ────────────────────────────────────────────────────────────────────────────────


@infers(aten.softmax.int, aten.log_softmax.int)
def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    _dims(x, dim)
    return empty_meta(x.shape, dtype or x.dtype)


@infers(aten._softmax.default, aten._log_softmax.default)
def _softmax_of_halves(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _softmax(x, dim, torch.float32 if half_to_float else None)


@infers(aten.layer_norm.default, aten.rms_norm.default)
def _norm(x: Tensor, normalized_shape: Sequence[int], *weights: Any, **_: Any) -> Tensor:
    if list(x.shape[-len(normalized_shape) :]) != list(normalized_shape):
        raise ProgramError(f"a norm over {list(normalized_shape)} does not fit a tensor {list(x.shape)}")
    for weight in weights:
        if isinstance(weight, Tensor) and list(weight.shape) != list(normalized_shape):
            raise ProgramError(f"a norm over {list(normalized_shape)} expects such a weight; got {list(weight.shape)}")
    return empty_meta(x.shape, x.dtype)


@infers(aten.cumsum.default)
def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    _dims(x, dim)
    return empty_meta(x.shape, dtype or _sum_dtype(x))


@infers(aten.sum.dim_IntList, aten.mean.dim, aten.sum.default, aten.mean.default)
def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return _reduced(x, dim, keepdim, dtype=dtype or _sum_dtype(x))


@infers(aten.amax.default, aten.amin.default)
def _reduced(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = _dims(x, dim)
    shape = [1 if i in dims else size for i, size in enumerate(x.shape) if keepdim or i not in dims]
    return empty_meta(shape, dtype or x.dtype)


INFER[aten.argmax.default] = partial(_reduced, dtype=torch.int64)
INFER[aten.any.dim] = INFER[aten.all.dim] = partial(_reduced, dtype=torch.bool)


@infers(aten.gather.default)
def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    _dims(x, dim)
    return empty_meta(index.shape, x.dtype)


def _dims(x: Tensor, dim: Any) -> list[int]:
    """The non-negative dimensions of a `dim` argument; all of them for None or an empty list."""
    dims = list(dim) if isinstance(dim, Sequence) else [] if dim is None else [dim]
    if any(not -x.dim() <= each < max(x.dim(), 1) for each in dims):
        raise ProgramError(f"a tensor {list(x.shape)} has no dimension {dims}")
    return [each % max(x.dim(), 1) for each in dims] or list(range(x.dim()))


def _sum_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.int64


# ── selecting and concatenating ───────────────────────────────────────────────────────────────────────────────


@infers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(condition: Tensor, x: Any, y: Any) -> Tensor:
    return empty_meta(broadcast_shapes([condition, x, y]), torch.result_type(x, y))


@infers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return empty_meta(broadcast_shapes([x, mask]), x.dtype)


@infers(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
def _clamp(x: Tensor, *bounds: Any, **named: Any) -> Tensor:
    dtype = x.dtype
    for bound in (*bounds, *named.values()):
        if bound is not None:
            dtype = torch.promote_types(dtype, torch.result_type(x, bound))
    return empty_meta(x.shape, dtype, x)


@infers(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(x: Tensor, other: Any, alpha: float = 1) -> Tensor:
    return empty_meta(broadcast_shapes([x, other]), torch.result_type(x, other), x)


@infers(aten.cat.default, aten.concat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = [t for t in tensors if tuple(t.shape) != (0,)] or list(tensors)  # torch ignores empty vectors
    first = parts[0]
    axis = _dims(first, dim)[0]
    for part in parts:
        if part.dim() != first.dim() or any(part.shape[i] != first.shape[i] for i in range(first.dim()) if i != axis):
            raise ProgramError(f"cat along dimension {dim} does not fit shapes {[list(t.shape) for t in tensors]}")
    shape = list(first.shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return empty_meta(shape, _promoted(parts))


@infers(aten.stack.default)
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    if any(part.shape != first.shape for part in tensors):
        raise ProgramError(f"stack expects tensors of equal shapes; got {[list(t.shape) for t in tensors]}")
    axis = dim % (first.dim() + 1)
    return empty_meta((*first.shape[:axis], len(tensors), *first.shape[axis:]), _promoted(tensors))


def _promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, [tensor.dtype for tensor in tensors])


# ── filling ───────────────────────────────────────────────────────────────────────────────────────────────────


@infers(aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default)
def _like(x: Tensor, *value: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return empty_meta(x.shape, dtype or x.dtype, x)


@infers(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default)
def _new(x: Tensor, size: Sequence[int], *value: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return empty_meta(size, dtype or x.dtype)


@infers(aten.copy_.default)
def _copied(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    _check_fits(source, to)
    return to


@infers(
    aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor,
    aten.clamp_.default,
)  # fmt: skip
def _filled(x: Tensor, *_: Any, **options: Any) -> Tensor:
    return x


def _check_fits(source: Tensor, to: Tensor) -> None:
    if broadcast_shapes([source, to]) != tuple(to.shape):
        raise ProgramError(f"a tensor {list(source.shape)} does not fit into one {list(to.shape)}")
