"""The kernel between the projections and attention: norm, rotation and cache write of all heads, in one pass.

`write_cache` calls it for one tensor; a program joins the steps of queries, keys and values (`onward.program.fuse`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from onward.native.interface import Code, Float, Int, Pointer, Structure, kernel
from onward.ops.kernel_calls import KernelCalls, Operand, Unsupported
from onward.ops.kv_format import kernel_code
from onward.ops.rope import angles

# Positions of a block of a paged cache. The attention kernel visits keys in blocks of 64 at absolute multiples of 64
# (native/src/attention/problem.h), each of which is one block of memory.
BLOCK = 64


class HeadsArguments(Structure):
    """OnwardHeads of native/src/heads.cpp, which documents the fields."""

    _fields_ = (
        ("heads", Int),
        ("x", Pointer),
        ("x_strides", Int * 3),
        ("norm_weight", Pointer),
        *((name, Float) for name in ("eps", "weight_offset")),
        *((name, Code) for name in ("after_cast", "rotate")),
        ("out", Pointer),
        ("out_strides", Int * 3),
        ("to_cache", Code),
        ("positions", Int),
        ("table", Pointer),
        ("table_stride", Int),
    )


# cos, sin and angle_strides (int64 [2]): or None; offsets: int32, or None
@kernel
def onward_heads(
    parts: HeadsArguments, count: Int, batch: Int, queries: Int, dim: Int, dtype: Code, cos: Pointer, sin: Pointer,
    angle_strides: Pointer, pairs: Int, offsets: Pointer,
) -> Code: ...  # fmt: skip


class Norm(NamedTuple):
    """The arguments of an `rms_norm` apart from x."""

    weight: Operand
    eps: float
    offset: float
    after_cast: bool


class HeadsPart(NamedTuple):
    """The heads of one projection. Shapes and dtypes are those of the ops.

    x: [B, H, T, D]. out: of x's shape, or a cache. norm: before the rotation, or None. rotate: 0 for no rotation, 1 for
    pairs (i, R + i), 2 for pairs (2i, 2i + 1). to_cache: whether out is a cache, which gets the result at the offsets.
    table: of a paged cache, or None.
    """

    x: Operand
    out: Operand
    norm: Norm | None = None
    rotate: int = 0
    to_cache: bool = False
    table: Operand | None = None


def call_heads(
    k: KernelCalls, parts: Sequence[HeadsPart], offsets: Operand | None, cos_sin: tuple[Operand, Operand] | None
) -> None:
    """One call for parts of the same B, T, D and dtype. offsets: int32 [B]; None if no part has a cache. cos_sin: of
    the parts that rotate."""
    inputs = [part.x for part in parts]
    if any(x.stride()[-1] != 1 for x in inputs):
        inputs = [k.contiguous(x) for x in inputs]
    structs = [_struct(k, part, x) for part, x in zip(parts, inputs, strict=True)]
    batch, _, queries, dim = inputs[0].shape
    cos, sin, pairs, strides = (None, None, 0, None) if cos_sin is None else angles(k, *cos_sin)
    k.call(
        onward_heads, k.array(structs), len(structs), batch, queries, dim, k.code(inputs[0]), cos, sin, strides, pairs,
        k.optional(offsets),
    )  # fmt: skip


def _struct(k: KernelCalls, part: HeadsPart, x: Operand) -> Any:
    _, out, norm, rotate, to_cache, table = part
    if out.stride()[-1] != 1:
        raise Unsupported("a cache whose features are not contiguous")
    weight, eps, offset, after_cast = norm or (None, 0.0, 0.0, False)
    positions, table_stride = out.shape[2] if to_cache else 0, 0
    if table is not None:
        table = k.contiguous_rows(table)
        positions, table_stride = BLOCK * table.shape[1], table.stride()[0]
    return k.struct(
        HeadsArguments, heads=x.shape[1], x=k.address(x), x_strides=x.stride()[:3], norm_weight=k.optional(weight),
        eps=eps, weight_offset=offset, after_cast=after_cast, rotate=rotate, out=k.address(out),
        out_strides=out.stride()[:3], to_cache=1 + kernel_code(out.dtype) if to_cache else 0, positions=positions,
        table=None if table is None else k.address(table), table_stride=table_stride,
    )  # fmt: skip
