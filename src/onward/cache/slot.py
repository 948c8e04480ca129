"""Slots: one row of a paged cache each."""

import itertools
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class CacheView(NamedTuple):
    """The cache that a forward gets, and which of its rows are those of the slots.

    rows: the row of each slot asked for. offsets: for every row of the cache the position from which a forward may
    write where the row is none of these; None where the cache has the rows asked for alone, in order.
    """

    cache: Any
    rows: Sequence[int]
    offsets: Sequence[int] | None = None


NEVER = sys.maxsize
_stamps = itertools.count(1)


class AdapterRef(Protocol):
    """What changes the weights for a row.

    index: its number among those that a forward reads, from 1 on; 0 is that of rows without one. digest: of its
    content: texts of other digests share no keys and values.
    """

    @property
    def index(self) -> int: ...

    @property
    def digest(self) -> str: ...


def index_of(adapter: AdapterRef | None) -> int:
    """What a forward knows a row's adapter by."""
    return 0 if adapter is None else adapter.index


def digest_of(adapter: AdapterRef | None) -> str:
    """What the texts of an adapter are told apart by; "" for those without one."""
    return "" if adapter is None else adapter.digest


class Slot:
    """A row's place in the memory. Made by `PagedCacheManager.acquire` and `fork`, and theirs to change.

    blocks: in order of position. length: positions reserved. sealed: how many of the first blocks are final: others may
    see them, and the slot does not write them. noted: how many of the first blocks can be found. note_at: the number of
    ids at which `note` has something to do. findable: whether its text may be found at all. stamp: changes with blocks.
    windows: the blocks of sliding layers that it has, by their index among `blocks`. most_windows: how many of them it
    may have. state: the slot of its recurrent states; None without recurrent layers. branch: up to which block's end
    its prompt was found, with recurrent states after less of it, or none; 0 where all that was found is used. adapter:
    that its keys and values are computed with.
    """

    __slots__ = (
        "adapter",
        "blocks",
        "branch",
        "findable",
        "length",
        "most_windows",
        "note_at",
        "noted",
        "sealed",
        "stamp",
        "state",
        "thread",
        "windows",
    )

    def __init__(self, blocks: list[int], length: int, sealed: int, adapter: AdapterRef | None = None) -> None:
        self.adapter = adapter
        self.blocks, self.length, self.sealed = blocks, length, sealed
        self.noted = 0
        self.note_at = 0
        self.findable = True
        self.windows: dict[int, int] = {}
        self.most_windows = 0
        self.state: int | None = None
        self.branch = 0
        self.stamp = next(_stamps)
        self.thread = threading.get_ident()

    def place(self, blocks: list[int]) -> None:
        """Let the slot lie in these blocks."""
        self.stamp = next(_stamps)  # first: an interrupt between the two must not leave a table that is out of date
        self.blocks = blocks

    def place_windows(self, windows: dict[int, int]) -> None:
        """Let its sliding layers have these blocks."""
        self.stamp = next(_stamps)
        self.windows = windows

    def void(self) -> None:
        """The slot was released: it has no blocks any more, and no stamp by which a table could be its own."""
        self.stamp, self.note_at, self.blocks, self.length = 0, NEVER, [], 0

    def __repr__(self) -> str:
        return f"<Slot of {self.length} positions in {len(self.blocks)} blocks>"
