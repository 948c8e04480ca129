"""Block tables: the leaf of a paged cache that says in which blocks each row lies.

A forward over the same rows as the last one reuses the tensors: only rows that changed are written.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache.paged import KVPool
from onward.cache.slot import Slot


class _Table(NamedTuple):
    """A table of some number of rows.

    host: int32 [B, K * M]: a table of M blocks of the layers that keep the whole text, and beside it one of the sliding
    layers, where there are such. device: the same on the memory's device. states, adapters: int32 [B] there, the slot
    of each row's states and the index of its adapter. stamps: what each row was written for; -1: nothing.
    """

    host: Tensor
    device: Tensor
    states: Tensor
    adapters: Tensor
    stamps: list[int]


class BlockTableTensors:
    """Views of the memory through tables of `width` blocks a row.

    Numbers of rows up to the same power of two share a table: rows that end one by one take no table each.
    """

    def __init__(self, memory: KVPool, width: int) -> None:
        self._memory, self._width = memory, width
        self._spares = [memory.count] if memory.windows is None else [memory.count, memory.windows.count]
        self._tables: dict[int, _Table] = {}
        self._caches: dict[tuple[int, bool], Any] = {}

    def current(self, stamps: list[int], adapted: bool = False) -> Any:
        """The cache of the rows with these stamps; None unless its table is as it was written for them.

        adapted: whether it says which adapters the rows have.
        """
        batch = len(stamps)
        cache = self._caches.get((batch, adapted))
        return cache if cache is not None and self._table(batch).stamps[:batch] == stamps else None

    def view(
        self,
        rows: Sequence[Slot],
        stamps: list[int],
        states: Sequence[int] = (),
        adapters: Sequence[int] = (),
    ) -> Any:
        """The cache of these rows, valid until the next call.

        Args:
            rows: where each row lies. Entries where it has no block name the memory's spare block.
            states: the slot of each row's states, where the memory has such.
            adapters: the index of each row's adapter; the cache has them where one is not 0.
            stamps: of each row a number above 0 that changes with its blocks.
        """
        batch = len(rows)
        table = self._table(batch)
        host = table.host.numpy()
        for row, (place, stamp) in enumerate(zip(rows, stamps, strict=True)):
            if table.stamps[row] != stamp:
                table.stamps[row] = -1  # until it is whole: an interrupt may come
                host[row, : len(place.blocks)] = place.blocks
                host[row, len(place.blocks) : self._width] = self._spares[0]
                if len(self._spares) > 1:
                    of_windows = host[row, self._width :]
                    of_windows[:] = self._spares[1]
                    of_windows[list(place.windows)] = list(place.windows.values())
                if table.device is not table.host:
                    table.device[row].copy_(table.host[row])
                if states:
                    table.states[row] = states[row]
                if adapters:
                    table.adapters[row] = adapters[row]
                table.stamps[row] = stamp
        key = batch, any(adapters)
        if key not in self._caches:
            slots = () if self._memory.states is None else (table.states[:batch],)
            cache = self._memory.view(*torch.split(table.device[:batch], self._width, 1), *slots)
            self._caches[key] = cache._replace(adapters=(table.adapters[:batch],)) if key[1] else cache
        return self._caches[key]

    def _table(self, batch: int) -> _Table:
        """The table for so many rows, which may have more."""
        rows = 1 << max(batch - 1, 0).bit_length()
        if rows not in self._tables:
            host = torch.zeros(rows, len(self._spares) * self._width, dtype=torch.int32)
            device = host if self._memory.device.type == "cpu" else host.to(self._memory.device)
            states, adapters = torch.zeros(2, rows, dtype=torch.int32, device=device.device)
            self._tables[rows] = _Table(host, device, states, adapters, [-1] * rows)
        return self._tables[rows]
