"""Tables of blocks, one for each number of rows: the leaf of a paged cache that says where each row lies.

A forward over the same rows as the last one of that batch finds its table as it was.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache.block_pool import BlockMemory


class _Table(NamedTuple):
    """A table of a number of rows, and the cache over it.

    host: int32 [B, M]. device: the same on the memory's device. stamps: what each row was written for; -1: nothing.
    """

    host: Tensor
    device: Tensor
    cache: Any
    stamps: list[int]


class BlockTables:
    """Views of the memory through tables of `width` blocks a row."""

    def __init__(self, memory: BlockMemory, width: int) -> None:
        self._memory, self._width = memory, width
        self._tables: dict[int, _Table] = {}

    def view(self, rows: Sequence[Sequence[int]], stamps: list[int]) -> Any:
        """The cache of these rows, valid until the next call for as many.

        Args:
            rows: the blocks of each row, in order of position. Entries past them are 0; a forward does not read them.
            stamps: of each row a number above 0 that changes with its blocks.
        """
        table = self._tables.get(len(rows)) or self._new(len(rows))
        if stamps != table.stamps:
            self._write(table, rows, stamps)
        return table.cache

    def current(self, stamps: list[int]) -> Any:
        """The cache of the rows that had these stamps when it was last asked for; None if their table has changed."""
        table = self._tables.get(len(stamps))
        return table.cache if table is not None and table.stamps == stamps else None

    def _new(self, batch: int) -> _Table:
        host = torch.zeros(batch, self._width, dtype=torch.int32)
        device = host if self._memory.device.type == "cpu" else host.to(self._memory.device)
        table = self._tables[batch] = _Table(host, device, self._memory.view(device), [-1] * batch)
        return table

    def _write(self, table: _Table, rows: Sequence[Sequence[int]], stamps: list[int]) -> None:
        host = table.host.numpy()
        for row, (blocks, stamp) in enumerate(zip(rows, stamps, strict=True)):
            if table.stamps[row] != stamp:
                table.stamps[row] = -1  # until it is whole: an interrupt may come
                host[row, : len(blocks)] = blocks
                host[row, len(blocks) :] = 0
                table.stamps[row] = stamp
        if table.device is not table.host:
            table.device.copy_(table.host)
