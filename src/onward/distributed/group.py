"""Rank 0's side of a split model: what it tells the others, and what it has of their memory."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch

from onward.cache import KVCache, LayerShape
from onward.distributed.heartbeat import Watch
from onward.distributed.links import Links
from onward.distributed.messages import Kind
from onward.distributed.processes import Started
from onward.distributed.rows import empty_like_row, joined, parts
from onward.errors import RankError


class Group:
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
        processes: Started | None,
    ) -> None:
        self.links, self.shapes, self.dtype, self.processes = links, shapes, dtype, processes
        self.lock = threading.RLock()
        self.memories: dict[int, int] = {}
        self.others = range(1, links.world)
        self.broken = ""
        self._count = 0
        self._forgotten: deque[int] = deque()
        self._pid = os.getpid()
        hung = _Hung(links, processes)
        self._hung, self._watch = hung, Watch(links.store, self.others, hung)
        self.close = weakref.finalize(self, _close, links, self.others, processes, self._pid, self._watch)

    def __reduce__(self) -> NoReturn:
        raise RankError("a model over several ranks belongs to its process: load it again instead of copying it")

    @property
    def row_shapes(self) -> list[LayerShape]:
        """The shapes of a row's layers, of all ranks."""
        return [shape for of_rank in self.shapes for shape in of_rank]

    def tell(self, kind: Kind, *numbers: int) -> None:
        """Tell all others, in order with what they were told before.

        Raises:
            RankError: a rank has ended.
        """
        self.check()
        with self.lock:
            self.check()
            try:
                while self._forgotten:
                    self.links.tell([Kind.FORGET, self._forgotten.popleft()], self.others)
                self.links.tell([kind, *numbers], self.others)
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
        """What the ranks do together, one thing at a time.

        Raises:
            RankError: one of them hangs, or has ended.
        """
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


class _Hung:
    """Ends the waiting for a rank that hangs: connections close. why: is known before they do; "" while all is well."""

    def __init__(self, links: Links, processes: Started | None) -> None:
        self._links, self._processes, self.why = links, processes, ""

    def __call__(self, why: str) -> None:
        self.why = why
        if self._processes is not None:
            self._processes.kill()
        else:
            self._links.abort()


def _close(links: Links, others: Sequence[int], processes: Started | None, pid: int, watch: Watch) -> None:
    if os.getpid() != pid:  # the parent's connections are not a forked child's to close
        return
    watch.close()
    with suppress(RankError):  # one may have ended, and then all do
        links.tell([Kind.END], others)
    if processes is not None:
        processes.end()
