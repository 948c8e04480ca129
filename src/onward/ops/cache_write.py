"""Storing new keys or values in a cache, dense or in blocks."""

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.native import Library
from onward.native.interface import HeadsArguments
from onward.ops.autocast import autocast_dtype
from onward.ops.blocks import BLOCK, check_blocks, check_table
from onward.ops.operators import DTYPES, TRAIN_WITHOUT_CACHE, Operator, returns_nothing, shapes


def write_cache(cache: Tensor, new: Tensor, offsets: Tensor, table: Tensor | None = None) -> None:
    """cache[b, :, offsets[b] : offsets[b] + T] = new[b], in place.

    Args:
        cache: [B, G, S, D]; with a table [N, G, 64, D], N blocks of 64 positions.
        new: [B, G, T, D], of the cache's dtype.
        offsets: int32 [B], each row's own; offsets[b] + T <= S.
        table: int32 [B, M], the block of each row's positions 64 m … 64 m + 63; then S is 64 M. Entries past the block
            of a row's last new position are not read.

    Raises:
        RequestError: shapes or dtypes that do not fit, or a gradient is wanted, which a write does not have; eagerly
            on the CPU also a row that reaches past the cache, or a block that does not exist.
    """
    if new.dtype != cache.dtype and autocast_dtype(new) is not None:
        new = new.to(cache.dtype)
    batch, heads, _, dim = new.shape
    if table is not None:
        check_table(table, batch, cache)
    fits = cache.dim() == 4 and (cache.shape[1], cache.shape[3]) == (heads, dim)
    fits = fits and (cache.shape[0] == batch or table is not None)
    if not fits or cache.dtype != new.dtype or offsets.shape != (batch,):
        raise RequestError(f"a cache [B, G, S, D] wants new [B, G, T, D]; got {shapes(cache=cache, new=new)}")
    _write_cache(cache, new, offsets, table)


def _definition(cache: Tensor, new: Tensor, offsets: Tensor, table: Tensor | None) -> None:
    positions = offsets.unsqueeze(1) + torch.arange(new.shape[2], device=new.device)
    if table is None:
        rows = torch.arange(new.shape[0], device=new.device).unsqueeze(1)
    else:
        rows, positions = table.gather(1, positions // BLOCK).long(), positions % BLOCK
    # The indexed dimensions lie side by side: of a slice between them `torch.func.vmap` mixes up the axes.
    cache.transpose(1, 2)[rows, positions] = new.transpose(1, 2)


def _native(library: Library, cache: Tensor, new: Tensor, offsets: Tensor, table: Tensor | None) -> None:
    """Check the places, then write them with the native threads."""
    if new.dtype in DTYPES and new.stride(-1) == 1 and cache.stride(-1) == 1:
        _checked_starts(cache, new, offsets, table)
        _call(library, cache, new, offsets, table)
    else:
        _by_row(cache, new, offsets, table)


def _by_row(cache: Tensor, new: Tensor, offsets: Tensor, table: Tensor | None) -> None:
    starts = _checked_starts(cache, new, offsets, table)
    if table is None:
        for b, offset in enumerate(starts):
            cache[b, :, offset : offset + new.shape[2]].copy_(new[b])
    else:
        _definition(cache, new, offsets, table)


def _checked_starts(cache: Tensor, new: Tensor, offsets: Tensor, table: Tensor | None) -> list[int]:
    """The offsets; raises where a row reaches past the cache, or its blocks do not exist."""
    queries, room = new.shape[2], cache.shape[2] if table is None else BLOCK * table.shape[1]
    starts: list[int] = offsets.tolist()
    for offset in starts:
        if not 0 <= offset <= room - queries:
            raise RequestError(f"a cache of {room} positions has no room for {queries} at {offset}")
    if table is not None:
        check_blocks(table, cache, starts, [offset + queries for offset in starts])
    return starts


def _call(library: Library, cache: Tensor, new: Tensor, offsets: Tensor, table: Tensor | None) -> None:
    batch, heads, queries, dim = new.shape
    offsets = offsets.to(torch.int32).contiguous()
    part = HeadsArguments(
        heads=heads, x=new.data_ptr(), x_strides=new.stride()[:3], out=cache.data_ptr(),
        out_strides=cache.stride()[:3], to_cache=1, positions=cache.shape[2],
    )  # fmt: skip
    if table is not None:
        table = table if table.stride(1) == 1 else table.contiguous()
        part.table, part.table_stride, part.positions = table.data_ptr(), table.stride(0), BLOCK * table.shape[1]
    status = library.onward_heads(
        part, 1, batch, queries, dim, DTYPES[new.dtype], None, None, None, 0, offsets.data_ptr()
    )
    library.check(status, "onward_heads")


_write_cache: Operator[None] = Operator(
    "write_cache(Tensor(a!) cache, Tensor new, Tensor offsets, Tensor? table) -> ()",
    _definition,
    _native,
    returns_nothing,
    _by_row,
    instead=TRAIN_WITHOUT_CACHE,
)
