"""Rows of keys and values as they go from rank to rank: dense caches of one row."""

from collections.abc import Sequence
from typing import Protocol

import torch

from onward.cache import KVCache, LayerShape


def empty_like_row(shapes: Sequence[LayerShape], positions: int, dtype: torch.dtype) -> KVCache:
    """A dense cache of one row of these layers, to be written."""
    return KVCache.of(shapes, batch=1, max_len=positions, dtype=dtype, device="cpu")


class Splits(Protocol):
    """How the keys and values of a row are spread over ranks."""

    def joined(self, rows: Sequence[KVCache]) -> KVCache:
        """The row of which each rank has one of these."""
        ...

    def parts(self, row: KVCache, shapes: Sequence[Sequence[LayerShape]]) -> list[KVCache]:
        """What each rank has of a row. shapes: of each rank's layers."""
        ...

    def whole(self, shapes: Sequence[Sequence[LayerShape]]) -> list[LayerShape]:
        """The shapes of a row's layers."""
        ...


class ByLayers:
    """Each rank has some layers."""

    def joined(self, rows: Sequence[KVCache]) -> KVCache:
        return KVCache(tuple(k for row in rows for k in row.keys), tuple(v for row in rows for v in row.values))

    def parts(self, row: KVCache, shapes: Sequence[Sequence[LayerShape]]) -> list[KVCache]:
        parts, begin = [], 0
        for own in shapes:
            end = begin + len(own)
            parts.append(KVCache(row.keys[begin:end], row.values[begin:end]))
            begin = end
        return parts

    def whole(self, shapes: Sequence[Sequence[LayerShape]]) -> list[LayerShape]:
        return [shape for own in shapes for shape in own]


class ByHeads:
    """Each rank has some heads of every layer."""

    def joined(self, rows: Sequence[KVCache]) -> KVCache:
        return KVCache(
            tuple(torch.cat(keys, 1) for keys in zip(*(row.keys for row in rows), strict=True)),
            tuple(torch.cat(values, 1) for values in zip(*(row.values for row in rows), strict=True)),
        )

    def parts(self, row: KVCache, shapes: Sequence[Sequence[LayerShape]]) -> list[KVCache]:
        keys, values = ([layer.chunk(len(shapes), 1) for layer in part] for part in (row.keys, row.values))
        return [
            KVCache(tuple(layer[rank] for layer in keys), tuple(layer[rank] for layer in values))
            for rank in range(len(shapes))
        ]

    def whole(self, shapes: Sequence[Sequence[LayerShape]]) -> list[LayerShape]:
        return [shape._replace(num_kv_heads=len(shapes) * shape.num_kv_heads) for shape in shapes[0]]
