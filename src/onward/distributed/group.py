"""Rank 0's side of a split model: what it tells the others, and what it has of their memory."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch
from torch import Tensor

from onward.cache import KVCache, KVPool, LayerShape
from onward.cache.kinds import lazy_zeros
from onward.cache.slot import Slot
from onward.distributed.launchers import HeartbeatMonitor
from onward.distributed.links import Kind, Links
from onward.distributed.ray import RankHandles
from onward.errors import RankError
from onward.ops.kv_write import BLOCK


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


class RankGroup:
    """All ranks, as rank 0 has them. They end when nobody holds it any more.

    shapes: what each rank's layers cache. memories: the number of each memory of blocks, by the address of its keys.
    processes: of the others, where this process has started them. A rank that hangs while this one waits for it breaks
    the group.
    """

    def __init__(
        self,
        links: Links,
        shapes: Sequence[tuple[LayerShape, ...]],
        dtype: torch.dtype,
        processes: RankHandles | None,
    ) -> None:
        self.links, self.shapes, self.dtype, self.processes = links, shapes, dtype, processes
        self.lock = threading.RLock()
        self.memories: dict[int, int] = {}
        self.others = range(1, links.world)
        self.broken = ""
        self._count = 0
        self._forgotten: deque[int] = deque()
        self._pid = os.getpid()
        hung = _RankTimeout(links, processes)
        self._hung, self._watch = hung, HeartbeatMonitor(links.store, self.others, hung)
        self.close = weakref.finalize(self, _close, links, self.others, processes, self._pid, self._watch)

    def __reduce__(self) -> NoReturn:
        raise RankError("a model over several ranks belongs to its process: load it again instead of copying it")

    @property
    def row_shapes(self) -> list[LayerShape]:
        """The shapes of a row's layers, of all ranks."""
        return [shape for of_rank in self.shapes for shape in of_rank]

    def tell(self, kind: Kind, *numbers: int) -> None:
        """Tell all others, in order with what they were told before. Raises `RankError`: a rank has ended."""
        self.check()
        with self.lock:
            self.check()
            try:
                while self._forgotten:
                    self.links.send_ints([Kind.FORGET, self._forgotten.popleft()], self.others)
                self.links.send_ints([kind, *numbers], self.others)
            except RankError as error:  # some were told, and others were not
                self.broke(str(error))
                raise

    def check(self) -> None:
        """Raise `RankError` where the ranks cannot be told anything."""
        if os.getpid() != self._pid:
            raise RankError("a forked child does not have its parent's ranks: load the model in the child")
        if self.broken:
            raise RankError(self.broken)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """What the ranks do together, one thing at a time. Raises `RankError`: one of them hangs, or has ended."""
        with self.lock, self._watch.waiting():
            try:
                yield
            except RankError as error:
                self.broke(str(error))
                raise RankError(self.broken) from error
            except Exception as error:
                if not self._hung.why:
                    raise
                self.broke(self._hung.why)
                raise RankError(self.broken) from error

    def new_memory(self, count: int) -> int:
        """Have all others make memory for so many blocks; its number."""
        with self.lock:
            self._count += 1
            self.tell(Kind.NEW, self._count, count)
            return self._count

    def forget(self, key: int) -> None:
        """Nobody uses a memory any more. The garbage collector calls this at any time, so the others are told later."""
        self._forgotten.append(self.memories.pop(key))

    def broke(self, why: str) -> None:
        """Refuse everything from now on, and end the others: what the ranks send each other is out of step."""
        self.broken = self.broken or self._hung.why or why
        self.close()

    def read(self, number: int, blocks: Sequence[int], positions: int, own: KVCache) -> KVCache:
        """A row of a memory, of all ranks' layers. own: rank 0's."""
        with self.exchanging():
            self.tell(Kind.READ, number, positions, *blocks)
            rows = [empty_like_row(shapes, positions, self.dtype) for shapes in self.shapes[1:]]
            for rank, row in zip(self.others, rows, strict=True):
                for tensor in (*row.keys, *row.values):
                    self.links.receive(tensor, rank)
        return joined([own, *rows])

    def write(self, number: int, blocks: Sequence[int], positions: int, row: KVCache) -> KVCache:
        """Give the others their layers of a row; returns rank 0's."""
        own, *others = parts(row, self.shapes)
        with self.exchanging():
            self.tell(Kind.WRITE, number, positions, *blocks)
            for rank, part in zip(self.others, others, strict=True):
                for tensor in (*part.keys, *part.values):
                    self.links.send(tensor[:, :, :positions], rank)
            self.links.settle()
        return own


class _RankTimeout:
    """Ends the waiting for a rank that hangs: connections close. why: is known before they do; "" while all is well."""

    def __init__(self, links: Links, processes: RankHandles | None) -> None:
        self._links, self._processes, self.why = links, processes, ""

    def __call__(self, why: str) -> None:
        self.why = why
        if self._processes is not None:
            self._processes.kill()
        else:
            self._links.abort()


def _close(
    links: Links, others: Sequence[int], processes: RankHandles | None, pid: int, watch: HeartbeatMonitor
) -> None:
    if os.getpid() != pid:  # the parent's connections are not a forked child's to close
        return
    watch.close()
    with suppress(RankError):  # one may have ended, and then all do
        links.send_ints([Kind.END], others)
    if processes is not None:
        processes.end()


class ShardedKVPool(KVPool):
    """Rank 0's blocks, which have the same numbers on every rank. What is done to them here is done there."""

    def __init__(self, buffer: Tensor, group: RankGroup) -> None:
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

    def read(self, place: Slot, positions: int) -> KVCache:
        return self._group.read(self.number, place.blocks, positions, super().read(place, positions))

    def write(self, place: Slot, cache: KVCache, positions: int) -> None:
        super().write(place, self._group.write(self.number, place.blocks, positions, cache), positions)


def new_blocks(group: RankGroup, count: int) -> ShardedKVPool:
    """Memory for so many blocks on every rank. Raises `RequestError`: the system refuses so much."""
    features = numbers_of_block(group.shapes[0])
    return ShardedKVPool(lazy_zeros((count + 1, features), group.dtype, torch.device("cpu"), huge_pages=True), group)


def new_cache(group: RankGroup, batch: int, max_len: int) -> KVCache:
    """A dense cache of all ranks' layers, for rows that are saved or restored; no forward takes it."""
    return KVCache.of(group.row_shapes, batch=batch, max_len=max_len, dtype=group.dtype, device="cpu")


def numbers_of_block(shapes: Sequence[LayerShape]) -> int:
    """How many numbers a block of these layers has."""
    return BLOCK * sum(shape.features for shape in shapes)


class Tables:
    """A rank's own tables of blocks, filled with what rank 0 says.

    Every forward gets the same tensors, so programs stay bound to them.
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
