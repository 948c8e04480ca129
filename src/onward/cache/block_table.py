"""Block tables: the tensors of a paged cache that name each row's blocks.

Consecutive forwards over the same rows reuse the tensors: only changed rows are written.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache.paged import KVPool
from onward.cache.slot import Slot


class _Table(NamedTuple):
    """A block table for some number of rows.

    host: int32 [B, K * M]: M full-attention blocks, then M sliding-window blocks, if any. device: the same on the
    pool's device. states, adapters: int32 [B] there, each row's state slot and adapter index. stamps: of the slot
    that each row was written for; -1 for none.
    """

    host: Tensor
    device: Tensor
    states: Tensor
    adapters: Tensor
    stamps: list[int]


class BlockTableTensors:
    """Views of a pool through tables of `width` blocks per row.

    Batch sizes up to the same power of two share a table, so rows that end one by one need no table each.
    """

    def __init__(self, memory: KVPool, width: int) -> None:
        self._memory, self._width = memory, width
        self._spares = [memory.count] if memory.windows is None else [memory.count, memory.windows.count]
        self._tables: dict[int, _Table] = {}
        self._caches: dict[tuple[int, bool], Any] = {}

    def current(self, stamps: list[int], adapted: bool = False) -> Any:
        """The cache of the rows with these stamps, if its table is up to date. adapted: whether rows have adapters."""
        batch = len(stamps)
        cache = self._caches.get((batch, adapted))
        return cache if cache is not None and self._table(batch).stamps[:batch] == stamps else None

    def view(
        self, rows: Sequence[Slot], stamps: list[int], states: Sequence[int] = (), adapters: Sequence[int] = ()
    ) -> Any:
        """The cache of these rows, valid until the next call. Entries without a block name the spare block. stamps: of
        the rows, all above 0. states: their state slots, if any. adapters: their adapter indices."""
        batch = len(rows)
        table = self._table(batch)
        host = table.host.numpy()
        for row, (place, stamp) in enumerate(zip(rows, stamps, strict=True)):
            if table.stamps[row] != stamp:
                table.stamps[row] = -1  # until it is complete, in case of an interrupt
                host[row, : len(place.blocks)] = place.blocks
                host[row, len(place.blocks) : self._width] = self._spares[0]
                if len(self._spares) > 1:
                    windows = host[row, self._width :]
                    windows[:] = self._spares[1]
                    windows[list(place.windows)] = list(place.windows.values())
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
        rows = 1 << max(batch - 1, 0).bit_length()
        if rows not in self._tables:
            host = torch.zeros(rows, len(self._spares) * self._width, dtype=torch.int32)
            device = host if self._memory.device.type == "cpu" else host.to(self._memory.device)
            states, adapters = torch.zeros(2, rows, dtype=torch.int32, device=device.device)
            self._tables[rows] = _Table(host, device, states, adapters, [-1] * rows)
        return self._tables[rows]
