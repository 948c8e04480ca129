"""Calls of the generic kernels on torch tensors of any strides, without checks.

Outputs are filled with NaN (integers with 77, booleans with True) before the call, so that an element that a kernel
doesn't write is found.
"""

import ctypes
import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from kernel_calls import call
from torch import Tensor

from onward.native.generic import Binary, Reduce, Unary
from onward.native.interface import Element

ELEMENTS = {
    torch.float32: Element.F32, torch.bfloat16: Element.BF16, torch.float16: Element.F16, torch.int32: Element.I32,
    torch.int64: Element.I64, torch.bool: Element.BOOL, torch.float64: Element.F64,
}  # fmt: skip
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
# Half the distance of subnormals; subnormal bf16 results become 0 on AVX-512.
SMALLEST = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25, torch.float64: 0.0}

shapes = st.lists(st.sampled_from((1, 2, 3, 5, 17, 70)), max_size=4).filter(lambda s: math.prod(s) <= 20_000)
layouts = st.sampled_from(("plain", "reversed", "spread", "every second"))


def words(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def poison(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    fill = math.nan if dtype.is_floating_point else True if dtype == torch.bool else 77
    return torch.full(tuple(shape), fill, dtype=dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "plain" or x.dim() == 0:
        return x.contiguous()
    if layout == "reversed":  # the first dimension is the contiguous one
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if layout == "spread":
        memory = poison((*x.shape[:-1], x.shape[-1] + 3), x.dtype)[..., 1:-2]
    else:
        memory = poison((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
    return memory.copy_(x)


def tensor(x: Tensor) -> tuple[int, int, ctypes.Array]:
    return x.data_ptr(), ELEMENTS[x.dtype], words(x.stride())


def unary(op: Unary, x: Tensor, out: Tensor | torch.dtype | None = None) -> Tensor:
    out = out if isinstance(out, Tensor) else poison(x.shape, out or x.dtype)
    call("onward_unary", op, x.dim(), words(x.shape), *tensor(x), *tensor(out), 0.0)
    return out


def binary(op: Binary, compute: Element, a: Tensor, b: Tensor, out: Tensor | torch.dtype) -> Tensor:
    a, b = torch.broadcast_tensors(a, b)
    out = out if isinstance(out, Tensor) else poison(a.shape, out)
    call("onward_binary", op, compute, a.dim(), words(a.shape), *tensor(a), *tensor(b), *tensor(out))
    return out


def where(condition: Tensor, a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    condition, a, b = torch.broadcast_tensors(condition, a, b)
    result = poison(a.shape, out)
    call(
        "onward_where", a.dim(), words(a.shape), condition.data_ptr(), words(condition.stride()), *tensor(a),
        *tensor(b), *tensor(result),
    )  # fmt: skip
    return result


def reduce(op: Reduce, x: Tensor, dims: Sequence[int], out: torch.dtype) -> Tensor:
    """Over the dimensions `dims` of x, in that order."""
    outer = [d for d in range(x.dim()) if d not in dims]
    result = poison([x.shape[d] for d in outer], out)
    call(
        "onward_reduce", op, len(outer), words([x.shape[d] for d in outer]), len(dims),
        words([x.shape[d] for d in dims]), x.data_ptr(), ELEMENTS[x.dtype], words([x.stride(d) for d in outer]),
        words([x.stride(d) for d in dims]), *tensor(result),
    )  # fmt: skip
    return result


def along(name: str, *options: int, x: Tensor, dim: int, out: Tensor) -> Tensor:
    """softmax (option: log) or cumsum along a dimension."""
    outer = [d for d in range(x.dim()) if d != dim]
    call(
        f"onward_{name}", *options, len(outer), words([x.shape[d] for d in outer]), x.shape[dim], x.data_ptr(),
        ELEMENTS[x.dtype], words([x.stride(d) for d in outer]), x.stride(dim), out.data_ptr(), ELEMENTS[out.dtype],
        words([out.stride(d) for d in outer]), out.stride(dim),
    )  # fmt: skip
    return out


def softmax(x: Tensor, dim: int, *, log: bool = False, out: torch.dtype | None = None) -> Tensor:
    return along("softmax", int(log), x=x, dim=dim, out=poison(x.shape, out or x.dtype))


def cumsum(x: Tensor, dim: int, out: torch.dtype | None = None) -> Tensor:
    return along("cumsum", x=x, dim=dim, out=poison(x.shape, out or x.dtype))


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """a [..., M, K] @ b [..., K, N] (+ bias, broadcast to [M, N])."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    (m, k), n = a.shape[-2:], b.shape[-1]
    a, b = a.expand(*batch, m, k), b.expand(*batch, k, n)
    out = poison((*batch, m, n), a.dtype) if out is None else out
    added = (None, 0, 0)
    if bias is not None:
        bias = bias.expand(m, n)
        added = (bias.data_ptr(), *bias.stride())
    call(
        "onward_matmul", len(batch), words(batch), m, n, k, a.data_ptr(), words(a.stride()[:-2]), *a.stride()[-2:],
        b.data_ptr(), words(b.stride()[:-2]), *b.stride()[-2:], *added, out.data_ptr(), words(out.stride()[:-2]),
        *out.stride()[-2:], ELEMENTS[a.dtype], alpha, beta,
    )  # fmt: skip
    return out


def index(x: Tensor, indices: Sequence[Tensor | None], values: Tensor | None = None) -> Tensor:
    """x[indices], or x[indices] = values. Indexed dimensions are adjacent, and their result takes their place."""
    at = [d for d, i in enumerate(indices) if i is not None]
    present = [i for i in indices if i is not None]
    assert at == list(range(at[0], at[0] + len(at)))
    shape = torch.broadcast_shapes(*(i.shape for i in present))
    before, after = x.shape[: at[0]], x.shape[at[-1] + 1 :]
    result_shape = (*before, *shape, *after)
    x_strides = (*x.stride()[: at[0]], *(0 for _ in shape), *x.stride()[at[-1] + 1 :])
    table = []
    for d, i in zip(at, present, strict=True):
        strides = (*(0 for _ in before), *i.expand(shape).stride(), *(0 for _ in after))
        table += [i.data_ptr(), ELEMENTS[i.dtype], x.stride(d), x.shape[d], *strides]
    out = poison(result_shape, x.dtype) if values is None else values.expand(result_shape)
    call(
        "onward_index", len(result_shape), words(result_shape), out.data_ptr(), words(out.stride()), x.data_ptr(),
        x.element_size(), words(x_strides), len(present), words(table), int(values is not None),
    )  # fmt: skip
    return out if values is None else x


def assert_rounded(got: Tensor, want: Tensor, error: Tensor | float = 0.0) -> None:
    """got is want, known to `error` (absolute), rounded to got's dtype, by way of float32."""
    want = want.double()
    assert torch.equal(got.isnan(), want.to(got.dtype).isnan())
    bound = error + SMALLEST[got.dtype] + (want.abs() + error) * (ROUNDING[got.dtype] + 2.0**-24) * (1 + 2.0**-8)
    limit = torch.finfo(got.dtype).max
    wrong = (got.double() - want).abs() > bound
    wrong &= ~(want.isnan() | (got.double() == want))
    wrong &= ~(got.isinf() & (want.abs() + bound >= limit) & (got.sign() == want.sign()))
    assert not wrong.any(), f"{got[wrong][:5].tolist()} instead of {want[wrong][:5].tolist()}"
