"""Write new keys and values into a dense or a paged KV cache.

A paged cache stores keys and values in N blocks [G, 64, D] of 64 positions (PagedAttention, arXiv 2309.06180). A block
table int32 [B, M] names the block of each row's positions 64 m … 64 m + 63.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.ops.heads import BLOCK, HeadsPart, call_heads
from onward.ops.kernel_calls import KernelCalls, Operand
from onward.ops.kv_format import format_of
from onward.ops.operator import TRAIN_WITHOUT_CACHE, Operator, autocast_dtype, returns_nothing, shapes


def write_cache(cache: Tensor, new: Tensor, offsets: Tensor, table: Tensor | None = None) -> None:
    """cache[b, :, offsets[b] : offsets[b] + T] = new[b], in place.

    Args:
        cache: [B, G, S, D]; with a table [N, G, 64, D]. In the format of its dtype (`onward.ops.kv_format`).
        new: [B, G, T, D], of the cache's dtype.
        offsets: int32 [B], each row's own; offsets[b] + T <= S.
        table: int32 [B, M]; then S is 64 M. Entries past the block of a row's last new position are not read.

    Raises:
        RequestError: shapes or dtypes don't match, or autograd follows an argument: a write has no gradient. Eagerly
            on the CPU also a row that reaches past the cache, or a block that doesn't exist.
    """
    format, shape = format_of(cache.dtype), cache.shape
    takes = format.takes(new.dtype)
    if not takes and autocast_dtype(new) is not None:
        new, takes = new.to(cache.dtype), True
    batch, heads, _, dim = new.shape
    if table is not None:
        check_table(table, batch, cache)
    fits = takes and len(shape) == 4 and shape[1] == heads and shape[3] == format.width(dim)
    if not fits or not (shape[0] == batch or table is not None) or offsets.shape != (batch,):
        raise RequestError(f"a cache [B, G, S, D] expects new [B, G, T, D]; got {shapes(cache=cache, new=new)}")
    _write_cache(cache, new, offsets, table)


def _definition(cache: Tensor, new: Tensor, offsets: Tensor, table: Tensor | None) -> None:
    positions = offsets.unsqueeze(1) + torch.arange(new.shape[2], device=new.device)
    if table is None:
        rows = torch.arange(new.shape[0], device=new.device).unsqueeze(1)
    else:
        rows, positions = table.gather(1, positions // BLOCK).long(), positions % BLOCK
    # The indexed dimensions are adjacent: with a slice between them `torch.func.vmap` mixes up the axes.
    cache.transpose(1, 2)[rows, positions] = format_of(cache.dtype).store(new).transpose(1, 2)


def _call(k: KernelCalls, out: None, cache: Operand, new: Operand, offsets: Operand, table: Operand | None) -> None:
    if offsets.dtype != torch.int32:
        offsets = k.cast(offsets, torch.int32)
    call_heads(k, [HeadsPart(new, cache, to_cache=True, table=table)], offsets, None)


def _by_row(cache: Tensor, new: Tensor, offsets: Tensor, table: Tensor | None) -> None:
    if table is not None:
        return _definition(cache, new, offsets, table)
    stored = format_of(cache.dtype).store(new)
    for b, offset in enumerate(offsets.tolist()):
        cache[b, :, offset : offset + new.shape[2]].copy_(stored[b])
    return None


_write_cache: Operator[None] = Operator(
    "write_cache(Tensor(a!) cache, Tensor new, Tensor offsets, Tensor? table) -> ()",
    _definition, _call, returns_nothing, _by_row, instead=TRAIN_WITHOUT_CACHE,
    check=lambda cache, new, offsets, table: checked_ranges(cache, offsets, new.shape[2], table),
)  # fmt: skip


def check_table(table: Tensor, batch: int, cache: Tensor) -> None:
    """Raise unless `table` is int32 [B, M] and `cache` blocks [N, G, 64, D]."""
    if table.dim() != 2 or table.shape[0] != batch or table.dtype != torch.int32 or cache.shape[2:3] != (BLOCK,):
        raise RequestError(
            f"a table must be int32 [B, M], over blocks [N, G, {BLOCK}, D], for {batch} rows; got "
            f"{shapes(table=table, cache=cache)}"
        )


def checked_ranges(
    cache: Tensor, offsets: Tensor, queries: int, table: Tensor | None, window: int = 0
) -> list[tuple[int, int]]:
    """The positions of each row that `queries` tokens at its offset access: the first, and one past the last.

    window: how many positions a token sees, itself included; 0 for all of them.

    Raises:
        RequestError: a row reaches past the cache, or the table names a block that the cache doesn't have.
    """
    room, ranges = capacity(cache, table), []
    for b, offset in enumerate(offsets.tolist()):
        if not 0 <= offset <= room - queries:
            raise RequestError(f"a cache of {room} positions has no room for {queries} at {offset}")
        start, end = max(0, offset + 1 - window) if window else 0, offset + queries
        ranges.append((start, end))
        blocks = [] if table is None else table[b, start // BLOCK : -(-end // BLOCK)].tolist()
        if blocks and not 0 <= min(blocks) <= max(blocks) < cache.shape[0]:
            raise RequestError(f"a cache has blocks 0 to {cache.shape[0] - 1}; row {b} of the table names {blocks}")
    return ranges


def capacity(cache: Operand, table: Operand | None) -> int:
    """The number of positions of a row, S."""
    return cache.shape[2] if table is None else BLOCK * table.shape[1]


def loaded(
    pick: Callable[..., Tensor], keys: Tensor, values: Tensor | None, value_dim: int, dtype: torch.dtype, *where: Any
) -> tuple[Tensor, Tensor]:
    """Keys [B, G, S, D] and values [B, G, S, E] in `dtype`. pick: `dense_rows` or `one_row`, called with `where`."""
    load = format_of(keys.dtype).load
    k = load(pick(keys, *where)).to(dtype)
    return k, k[..., :value_dim] if values is None else load(pick(values, *where)).to(dtype)


def dense_rows(cache: Tensor, table: Tensor | None, last: Tensor) -> Tensor:
    """A cache as one without a table [B, G, S, D]; of blocks a copy.

    last: int32 [B], each row's last position. The table is not read past its block; block 0 is copied instead.
    """
    if table is None:
        return cache
    starts = torch.arange(0, BLOCK * table.shape[1], BLOCK, device=table.device)
    return _side_by_side(cache[table.long().masked_fill(starts > last.unsqueeze(1), 0)])


def one_row(cache: Tensor, table: Tensor | None, b: int, start: int, end: int) -> Tensor:
    """Positions start … end - 1 of row b [1, G, end - start, D]."""
    if table is None:
        return cache[b : b + 1, :, start:end]
    first = start // BLOCK
    blocks = cache[table[b : b + 1, first : -(-end // BLOCK)].long()]
    return _side_by_side(blocks)[:, :, start - first * BLOCK : end - first * BLOCK]


def _side_by_side(blocks: Tensor) -> Tensor:
    """[B, M, G, 64, D] -> [B, G, 64 M, D]: the blocks of a row, concatenated."""
    return blocks.transpose(1, 2).flatten(2, 3)
