"""Calls of the kernels on torch tensors, without checks, for the tests and the benchmarks.

Outputs are filled with NaN before the call, so that an element that a kernel doesn't write is found.
"""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onward import native
from onward.native.interface import DType
from onward.ops.attention import AttentionArguments

CODES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}
DTYPES = tuple(CODES)


def use(isa: str, threads: int = 2) -> None:
    """Later calls run in the library `isa`."""
    native.select_isa(isa)
    native.set_num_threads(threads)


def call(name: str, *arguments: object) -> None:
    library = native.library()
    assert library is not None
    library.check(getattr(library, name)(*arguments), name)


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.full(tuple(shape), math.nan, dtype=dtype)


def strides(t: Tensor, count: int) -> ctypes.Array:
    """The first `count` strides; the rest must be contiguous."""
    assert t.stride(-1) == 1 or t.shape[-1] == 1
    return (ctypes.c_int64 * count)(*t.stride()[:count])


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    offsets: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int = 0,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
    out: Tensor | None = None,
    softcap: float = 0.0,
    cache_format: int = 0,
) -> Tensor:
    """q [B, H, T, D] against keys [B, G, S, D] and values [B, G, S, E], or blocks of both [N, G, 64, …].

    Causal from int32 offsets [B], otherwise every key.
    """
    batch, heads, queries, dim = q.shape
    out = poisoned((*q.shape[:3], values.shape[3]), q.dtype) if out is None else out
    arguments = AttentionArguments(
        batch=batch, heads=heads, kv_heads=keys.shape[1], queries=queries, positions=keys.shape[2], dim=dim,
        value_dim=values.shape[3],
        q=q.data_ptr(), keys=keys.data_ptr(), values=values.data_ptr(), out=out.data_ptr(),
        q_strides=strides(q, 3), keys_strides=strides(keys, 3), values_strides=strides(values, 3),
        out_strides=strides(out, 3), offsets=None if offsets is None else offsets.data_ptr(), window=window,
        scale=dim**-0.5 if scale is None else scale, sinks=None if sinks is None else sinks.data_ptr(),
        softcap=softcap, dtype=CODES[q.dtype], cache_format=cache_format,
    )  # fmt: skip
    if table is not None:
        arguments.positions = 64 * table.shape[1]
        arguments.table, arguments.table_stride = table.data_ptr(), table.stride(0)
    if mask is not None:
        mask = mask.expand(batch, heads, queries, arguments.positions)
        arguments.mask, arguments.mask_strides = mask.data_ptr(), (ctypes.c_int64 * 4)(*mask.stride())
    call("onward_attention", ctypes.byref(arguments))
    return out


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    after_cast: bool = True,
    residual: Tensor | None = None,
) -> Tensor:
    """Over the rows of x [R, D]; with a residual x becomes x + residual."""
    out = poisoned(x.shape, x.dtype)
    call(
        "onward_rms_norm", *x.shape, CODES[x.dtype], x.data_ptr(), x.stride(0),
        *residual_and_sum(x, residual),
        None if weight is None else weight.data_ptr(), offset, int(after_cast), eps, out.data_ptr(), out.stride(0),
    )  # fmt: skip
    return out


def residual_and_sum(x: Tensor, residual: Tensor | None) -> tuple[int | None, int, int | None, int]:
    """The sum goes back to x."""
    return (
        (None, 0, None, 0) if residual is None else (residual.data_ptr(), residual.stride(0), x.data_ptr(), x.stride(0))
    )


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float = 1e-5, residual: Tensor | None = None
) -> Tensor:
    out = poisoned(x.shape, x.dtype)
    call(
        "onward_layer_norm", *x.shape, CODES[x.dtype], x.data_ptr(), x.stride(0), *residual_and_sum(x, residual),
        None if weight is None else weight.data_ptr(), None if bias is None else bias.data_ptr(), eps,
        out.data_ptr(), out.stride(0),
    )  # fmt: skip
    return out


def rotary_angles(radians: Tensor) -> tuple[Tensor, Tensor]:
    """radians float32 [B, T, pairs] -> cos and sin, each [B, T, 2 pairs]."""
    *rows, pairs = radians.shape
    cos, sin = (poisoned((*rows, 2 * pairs), torch.float32) for _ in range(2))
    count = math.prod(rows)
    call("onward_rotary_angles", count, pairs, radians.data_ptr(), cos.data_ptr(), sin.data_ptr())
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, out: Tensor | None = None) -> Tensor:
    """x [B, H, T, D] by angles [B, T, pairs]."""
    out = poisoned(x.shape, x.dtype) if out is None else out
    call(
        "onward_rotate", *x.shape, CODES[x.dtype], x.data_ptr(), strides(x, 3), cos.data_ptr(), sin.data_ptr(),
        cos.shape[-1], strides(cos, 2), int(interleaved), out.data_ptr(), strides(out, 3),
    )  # fmt: skip
    return out


def combine(name: str, a: Tensor, b: Tensor, *options: int) -> Tensor:
    """swiglu, sigmoid_gate, geglu (option: approximate) or add over rows [R, D]."""
    out = poisoned(a.shape, a.dtype)
    call(
        f"onward_{name}", *a.shape, CODES[a.dtype], *options, a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0),
        out.data_ptr(), out.stride(0),
    )  # fmt: skip
    return out


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    out = poisoned((ids.numel(), table.shape[1]), table.dtype)
    call(
        "onward_gather_rows", ids.numel(), table.shape[1], CODES[table.dtype], table.data_ptr(), table.shape[0],
        table.stride(0), ids.data_ptr(), int(ids.dtype == torch.int64), out.data_ptr(), out.stride(0),
    )  # fmt: skip
    return out


def argmax(x: Tensor) -> Tensor:
    out = torch.full((x.shape[0],), -7, dtype=torch.int64)
    call("onward_argmax", *x.shape, x.data_ptr(), CODES[x.dtype], x.stride(0), out.data_ptr())
    return out
