"""Rows of keys and values as they go from rank to rank: dense caches of one row."""

from collections.abc import Sequence

import torch

from onward.cache import KVCache, LayerShape


def empty_like_row(shapes: Sequence[LayerShape], positions: int, dtype: torch.dtype) -> KVCache:
    """A dense cache of one row of these layers, to be written."""
    return KVCache.of(shapes, batch=1, max_len=positions, dtype=dtype, device="cpu")


def by_layers(caches: Sequence[KVCache]) -> KVCache:
    """One cache of the layers of several, in order."""
    return KVCache(tuple(k for c in caches for k in c.keys), tuple(v for c in caches for v in c.values))


def layers_of(cache: KVCache, counts: Sequence[int]) -> list[KVCache]:
    """A cache cut into runs of so many layers."""
    parts, begin = [], 0
    for count in counts:
        end = begin + count
        parts.append(KVCache(cache.keys[begin:end], cache.values[begin:end]))
        begin = end
    return parts
