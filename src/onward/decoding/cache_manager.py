"""The protocol of cache managers: where sequences keep their keys and values.

A slot holds the computed positions of one sequence. A forward receives a view of the slots it serves.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from onward.cache import AdapterRef
from onward.cache.slot import CacheView
from onward.models import Cache

Slot = Any
# (first, last) -> the ids at the positions first … last - 1 of a slot
Ids = Callable[[int, int], Sequence[int]]


class CacheManager(Protocol):
    """Allocates slots for sequences. Capacity is counted in blocks.

    lock: held by callers from `view_of` to `check_written`. total: the number of blocks. available: those that can be
        allocated now. cached: available blocks that prompts can still reuse. hits, lookups: ids reused and looked up.
    whole: whether every forward gets all rows, padded to one length, because the cache's row dimension is unknown.
    shares_rows: whether several rows of a view may belong to one slot.
    """

    lock: threading.RLock
    whole: bool
    shares_rows: bool
    hits: int
    lookups: int

    @property
    def total(self) -> int: ...

    @property
    def available(self) -> int: ...

    @property
    def cached(self) -> int: ...

    def blocks_for(self, length: int) -> int:
        """The number of blocks of a slot of `length` positions."""

    def shared_blocks(self, positions: int) -> int:
        """The number of blocks that a fork at this many positions shares with its source."""

    def blocks_of(self, slots: Sequence[Slot]) -> int:
        """The number of blocks that these slots use together."""

    def acquire(
        self, ids: Sequence[int], length: int, *, reuse: bool = True, adapter: AdapterRef | None = None
    ) -> tuple[Slot, int] | None:
        """Allocate a slot for `length` positions. Returns it with the number of ids it already holds, at most all but
        the last; None, with nothing changed, if there is no room now.

        adapter: the adapter that computes the slot's keys and values; forks inherit it.
        """

    def fork(self, slot: Slot, positions: int, length: int) -> Slot | None:
        """A slot of `length` positions that holds the first `positions` of another. None if there is no room, the
        cache's rows cannot be copied, or the recurrent states at that position are gone."""

    def reserve(self, slot: Slot, length: int) -> bool:
        """Make room for `length` positions. Returns False if there is none now."""

    def holds(self, slot: Slot, positions: int) -> bool:
        """Whether the slot can continue from an earlier position: not if the recurrent states there are gone."""

    def truncate(self, slot: Slot, positions: int) -> None:
        """Drop everything from `positions` on; it will be written again."""

    def advance(self, slot: Slot, computed: int, ids: Ids) -> None:
        """Mark the first `computed` positions as final."""

    def release(self, slot: Slot, ids: Sequence[int] = ()) -> None:
        """Release a slot whose first positions hold these ids."""

    def release_later(self, slot: Slot, ids: Sequence[int] = ()) -> None:
        """`release` for the garbage collector, which may call it in the middle of any other method."""

    def groups(self, slots: Sequence[Slot], tokens: int) -> list[list[int]]:
        """Group the slots, by index, that one forward of `tokens` tokens per row can serve together."""

    def set_weights_version(self, key: object) -> None:
        """Name the weights that compute new entries. A different key makes all cached entries unreachable."""

    def max_step_tokens(self, slots: Sequence[Slot], computed: Sequence[int]) -> int | None:
        """The most tokens per row in one forward if any of them may be removed again; None if unknown."""

    def max_chunk(self, slot: Slot, first: int, count: int) -> int:
        """How many of `count` prompt ids, from position `first` of a slot on, to process at once."""

    def ensure_writable(self, slots: Sequence[Slot], firsts: Sequence[int], tokens: int) -> None:
        """Allocate blocks for writing `tokens` tokens from each slot's first position on. Call it before `view_of`."""

    def view_of(self, slots: Sequence[Slot], tokens: int) -> CacheView:
        """The cache of these slots, for a forward of `tokens` tokens per row."""

    def check_written(self, view: CacheView, cache: Cache) -> None:
        """Accept the cache that a forward returned for a view."""
