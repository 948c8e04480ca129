"""Keys and values in blocks of 64 positions, which a table puts in order (PagedAttention, arXiv 2309.06180).

Shapes: N blocks of [G, 64, D]; a table int32 [B, M] names the block of each row's positions 64 m … 64 m + 63.
"""

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.ops.operators import shapes

# Positions of a block. The attention kernel visits keys in blocks of 64 at absolute multiples of 64
# (native/src/attention/problem.h), so each of these lies in one block of memory.
BLOCK = 64


def check_table(table: Tensor, batch: int, cache: Tensor) -> None:
    """Raise unless `table` is int32 [B, M] and `cache` blocks [N, G, 64, D]."""
    if table.dim() != 2 or table.shape[0] != batch or table.dtype != torch.int32 or cache.shape[2:3] != (BLOCK,):
        raise RequestError(
            f"a table must be int32 [B, M], over blocks [N, G, {BLOCK}, D], for {batch} rows; got "
            f"{shapes(table=table, cache=cache)}"
        )


def check_blocks(table: Tensor, cache: Tensor, starts: list[int], ends: list[int]) -> None:
    """Raise where positions starts[b] … ends[b] - 1 of a row lie in a block that the cache does not have."""
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        blocks = table[b, start // BLOCK : -(-end // BLOCK)].tolist()
        if blocks and not 0 <= min(blocks) <= max(blocks) < cache.shape[0]:
            raise RequestError(f"a cache has blocks 0 to {cache.shape[0] - 1}; row {b} of the table names {blocks}")


def dense_rows(cache: Tensor, table: Tensor, last: Tensor) -> Tensor:
    """The rows [B, G, 64 M, D] of blocks [N, G, 64, D], a copy.

    last: int32 [B], each row's last position. Past its block the table may say anything, and block 0 is copied.
    """
    starts = torch.arange(0, BLOCK * table.shape[1], BLOCK, device=table.device)
    return side_by_side(cache[table.long().masked_fill(starts > last.unsqueeze(1), 0)])


def side_by_side(blocks: Tensor) -> Tensor:
    """[B, M, G, 64, D] -> [B, G, 64 M, D]: the blocks of a row one after the other."""
    return blocks.transpose(1, 2).flatten(2, 3)
