"""What a paged cache consists of: slots, each a row, and the nodes of the prefix index."""

import hashlib
import itertools
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

# (first, last) -> the ids at the positions first … last - 1 of a slot
Ids = Callable[[int, int], Sequence[int]]


class CacheStats(NamedTuple):
    """total: the number of blocks. available: those that can be allocated now. cached: available blocks that prompts
    can still reuse. hits, lookups: positions that `acquire` reused, and was asked for, in all."""

    total: int
    available: int
    cached: int
    hits: int = 0
    lookups: int = 0


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
RELEASED = "the slot was released, or the process was forked by another thread"
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


def root_of(adapter: AdapterRef | None, salt: str | None) -> str:
    """The name of the root of the prefix index for rows with this adapter and salt."""
    if salt is None:
        return digest_of(adapter)
    return hashlib.blake2b(f"{digest_of(adapter)} {salt}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(eq=False, slots=True)
class Slot:
    """A row of a paged cache. Only `PagedCacheManager` creates and changes it.

    root: of its text in the prefix index (`root_of`). blocks: in order of position. length: reserved positions. noted:
    how many of the first blocks are in the prefix index. note_at: the number of ids at which `commit` has work to do.
    findable: whether the prefix index may have its blocks. windows: its sliding-window blocks, by their index among
    `blocks`. max_windows: the most of them. state: the block of its recurrent states. branch: the end of the last block
    of its prompt found in the prefix index without recurrent states; 0 if everything found was reused. stored: what
    only a store has of its text (`onward.cache.disk.StoredPath`). is_pin: whether it only keeps cached blocks. stamp:
    changes with the blocks; 0 after the release.
    """

    length: int
    adapter: AdapterRef | None = None
    root: str = ""
    blocks: list[int] = field(default_factory=list)
    noted: int = 0
    note_at: int = 0
    findable: bool = True
    windows: dict[int, int] = field(default_factory=dict)
    max_windows: int = 0
    state: int | None = None
    branch: int = 0
    stored: Any = None
    is_pin: bool = False
    stamp: int = field(default_factory=lambda: next(_stamps))
    thread: int = field(default_factory=threading.get_ident)

    def place(self, blocks: list[int]) -> None:
        self.blocks, self.stamp = blocks, next(_stamps)

    def place_windows(self, windows: dict[int, int]) -> None:
        self.windows, self.stamp = windows, next(_stamps)

    def void(self) -> None:
        """After its release, the slot has no blocks and matches no table."""
        self.blocks, self.windows, self.max_windows, self.state = [], {}, 0, None
        self.length, self.noted, self.note_at, self.stamp, self.stored = 0, 0, NEVER, 0, None

    def __repr__(self) -> str:
        return f"<Slot of {self.length} positions in {len(self.blocks)} blocks>"


Tokens = tuple[int, ...]
tokens_of = attrgetter("tokens")


@dataclass(eq=False, slots=True, repr=False)
class PrefixNode:
    """An entry of the prefix index: the blocks for some tokens, at most a block of them, after those of its parents.

    blocks: of each kind, None if it is not cached; the first one always is. children: ordered by their tokens.
    state_end: the number of positions that its recurrent states have seen.
    """

    tokens: Tokens
    blocks: list[int | None]
    parent: "PrefixNode | None"
    children: list["PrefixNode"] = field(default_factory=list)
    state_end: int = 0

    def detach(self) -> None:
        """Remove the node, a leaf, from its parent."""
        assert self.parent is not None, "a root stays"
        assert not self.children, "a leaf goes before its parent"
        del self.parent.children[bisect_left(self.parent.children, self.tokens, key=tokens_of)]


class PrefixMatch(NamedTuple):
    """A cached prefix of `positions` positions. nodes: from the root on; only a part of the last may be matched."""

    nodes: list[PrefixNode]
    positions: int
