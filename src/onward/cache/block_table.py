"""Block tables: the tensors of a paged cache that name each row's blocks.

Consecutive forwards over the same rows reuse the tensors: only changed rows are written.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache.paged import KVPool
from onward.cache.slot import RELEASED, Slot, index_of


class _Table(NamedTuple):
    """A block table for some number of rows.

    host: int32 [B, K * M]: M full-attention blocks, then M sliding-window blocks, if any. device: the same on the
    pool's device. states, adapters: int32 [B] there, each row's block of states and adapter index. stamps: of the slot
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
        self._views = 0

    def views(self) -> int:
        """The number of calls of `view`."""
        return self._views

    def view(self, slots: Sequence[Slot]) -> Any:
        """The cache of these rows, valid until the next call; the same object while rows stay. Entries without a block
        name the spare block."""
        self._views += 1
        batch = len(slots)
        stamps = [slot.stamp for slot in slots]
        adapters = [index_of(slot.adapter) for slot in slots]
        key = batch, any(adapters)
        table = self._table(batch)
        if table.stamps[:batch] != stamps:
            for row, slot in enumerate(slots):
                if table.stamps[row] != slot.stamp:
                    assert slot.stamp, RELEASED
                    table.stamps[row] = -1  # until it is complete, in case of an interrupt
                    self._write(table, row, slot, adapters[row])
                    table.stamps[row] = slot.stamp
        if key not in self._caches:
            states = () if self._memory.states is None else (table.states[:batch],)
            cache = self._memory.view(*torch.split(table.device[:batch], self._width, 1), *states)
            self._caches[key] = cache._replace(adapters=(table.adapters[:batch],)) if key[1] else cache
        return self._caches[key]

    def _write(self, table: _Table, row: int, slot: Slot, adapter: int) -> None:
        host = table.host.numpy()[row]
        host[: len(slot.blocks)] = slot.blocks
        host[len(slot.blocks) : self._width] = self._spares[0]
        if len(self._spares) > 1:
            windows = host[self._width :]
            windows[:] = self._spares[1]
            windows[list(slot.windows)] = list(slot.windows.values())
        if table.device is not table.host:
            table.device[row].copy_(table.host[row])
        if slot.state is not None:
            table.states[row] = slot.state
        table.adapters[row] = adapter

    def _table(self, batch: int) -> _Table:
        rows = 1 << max(batch - 1, 0).bit_length()
        if rows not in self._tables:
            host = torch.zeros(rows, len(self._spares) * self._width, dtype=torch.int32)
            device = host if self._memory.device.type == "cpu" else host.to(self._memory.device)
            states, adapters = torch.zeros(2, rows, dtype=torch.int32, device=device.device)
            self._tables[rows] = _Table(host, device, states, adapters, [-1] * rows)
        return self._tables[rows]
