"""Keys and values that lie on several ranks: rank 0 has the accounts, and tells the others what becomes of blocks."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from onward.cache import KVBlocks, KVCache, LayerShape
from onward.cache.block_pool import Place
from onward.cache.buffers import lazy_zeros
from onward.distributed.group import Group
from onward.distributed.messages import Kind
from onward.ops.blocks import BLOCK


class SplitBlocks(KVBlocks):
    """Rank 0's blocks, which have the same numbers on every rank. What is done to them here is done there."""

    def __init__(self, buffer: Tensor, group: Group) -> None:
        """buffer: of rank 0's layers."""
        super().__init__(buffer, group.shapes[0])
        self._group = group
        self.number = group.new_memory(self.count)
        # Every view of the memory holds this tensor.
        key = self._keys[0].data_ptr()
        group.memories[key] = self.number
        weakref.finalize(self._keys[0], group.forget, key).atexit = False
        self.block_nbytes = sum(map(numbers_of_block, group.shapes)) * buffer.itemsize

    def copy(self, source: int, to: int, positions: int) -> None:
        super().copy(source, to, positions)
        self._group.tell(Kind.COPY, self.number, source, to, positions)

    def give_back(self, blocks: Sequence[int]) -> None:
        super().give_back(blocks)
        self._group.tell(Kind.GIVE_BACK, self.number, *blocks)

    def read(self, place: Place, positions: int) -> KVCache:
        return self._group.read(self.number, place.blocks, positions, super().read(place, positions))

    def write(self, place: Place, cache: KVCache, positions: int) -> None:
        super().write(place, self._group.write(self.number, place.blocks, positions, cache), positions)


def new_blocks(group: Group, count: int) -> SplitBlocks:
    """Memory for so many blocks on every rank.

    Raises:
        RequestError: the system refuses so much.
    """
    features = numbers_of_block(group.shapes[0])
    return SplitBlocks(lazy_zeros((count + 1, features), group.dtype, torch.device("cpu"), huge_pages=True), group)


def new_cache(group: Group, batch: int, max_len: int) -> KVCache:
    """A dense cache of all ranks' layers, for rows that are saved or restored; no forward takes it."""
    return KVCache.of(group.row_shapes, batch=batch, max_len=max_len, dtype=group.dtype, device="cpu")


def numbers_of_block(shapes: Sequence[LayerShape]) -> int:
    """How many numbers a block of these layers has."""
    return BLOCK * sum(shape.features for shape in shapes)


class Tables:
    """A rank's own tables of blocks, filled with what rank 0 says.

    They stay the same tensors from forward to forward, so that a program need not be bound anew.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int, int], Tensor] = {}

    def filled(self, rows: Tensor, width: int, place: int = 0) -> Tensor:
        """int32 [B, width], whose rows begin as `rows` int32 [B, m]. What is past them is never read.

        place: among tables of as many rows that are in use at once.
        """
        key = len(rows), width, place
        if key not in self._tables:
            self._tables[key] = torch.zeros(len(rows), width, dtype=torch.int32)
        table = self._tables[key]
        table[:, : rows.shape[1]] = rows
        return table
