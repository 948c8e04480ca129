"""Slots: one row of a paged cache each."""

import itertools
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class CacheView(NamedTuple):
    """The cache for a forward.

    rows: the row of each requested slot. offsets: for every row of the cache, the position from which a forward may
    write if the row was not requested; None if the cache has only the requested rows, in order.
    """

    cache: Any
    rows: Sequence[int]
    offsets: Sequence[int] | None = None

    def select(self, x: Any) -> Any:
        """The requested slots' rows of a tensor with the rows of the cache."""
        return x if self.offsets is None else x[list(self.rows)]


NEVER = sys.maxsize
_stamps = itertools.count(1)


class AdapterRef(Protocol):
    """The adapter of a row.

    index: its number in a forward, from 1 on; 0 is no adapter. digest: of its content; rows with different digests
    share no keys and values.
    """

    @property
    def index(self) -> int: ...

    @property
    def digest(self) -> str: ...


def index_of(adapter: AdapterRef | None) -> int:
    return 0 if adapter is None else adapter.index


def digest_of(adapter: AdapterRef | None) -> str:
    return "" if adapter is None else adapter.digest


@dataclass(eq=False, slots=True)
class Slot:
    """A row of a paged cache. Only `PagedCacheManager` creates and changes it.

    blocks: in order of position. length: reserved positions. sealed: how many of the first blocks are final: they may
    be shared, and the slot does not write them. noted: how many of the first blocks are in the prefix index. note_at:
    the number of ids at which `note` has work to do. findable: whether the prefix index may have its blocks. windows:
    its sliding-window blocks, by their index among `blocks`. max_windows: the most of them. state: the slot of its
    recurrent states. branch: the end of the last block of its prompt found in the prefix index without recurrent
    states; 0 if everything found was reused. stamp: changes with the blocks.
    """

    blocks: list[int]
    length: int
    sealed: int
    adapter: AdapterRef | None = None
    noted: int = 0
    note_at: int = 0
    findable: bool = True
    windows: dict[int, int] = field(default_factory=dict)
    max_windows: int = 0
    state: int | None = None
    branch: int = 0
    stamp: int = field(default_factory=lambda: next(_stamps))
    thread: int = field(default_factory=threading.get_ident)

    def place(self, blocks: list[int]) -> None:
        self.stamp = next(_stamps)  # first: an interrupt between the two must not leave an outdated table
        self.blocks = blocks

    def place_windows(self, windows: dict[int, int]) -> None:
        self.stamp = next(_stamps)
        self.windows = windows

    def void(self) -> None:
        """After its release, the slot has no blocks and matches no table."""
        self.stamp, self.note_at, self.blocks, self.length = 0, NEVER, [], 0

    def __repr__(self) -> str:
        return f"<Slot of {self.length} positions in {len(self.blocks)} blocks>"
