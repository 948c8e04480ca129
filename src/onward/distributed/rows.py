"""Rows of keys and values as they go from rank to rank: dense caches of one row. Each rank has those of its layers."""

from collections.abc import Sequence

import torch

from onward.cache import KVCache, LayerShape


def empty_like_row(shapes: Sequence[LayerShape], positions: int, dtype: torch.dtype) -> KVCache:
    """A dense cache of one row of these layers, to be written."""
    return KVCache.of(shapes, batch=1, max_len=positions, dtype=dtype, device="cpu")


def joined(rows: Sequence[KVCache]) -> KVCache:
    """The row of which each rank has one of these."""
    return KVCache(tuple(k for row in rows for k in row.keys), tuple(v for row in rows for v in row.values))


def parts(row: KVCache, shapes: Sequence[Sequence[LayerShape]]) -> list[KVCache]:
    """The layers of a row that each rank has. shapes: of each rank's layers."""
    found, begin = [], 0
    for own in shapes:
        end = begin + len(own)
        found.append(KVCache(row.keys[begin:end], row.values[begin:end]))
        begin = end
    return found
