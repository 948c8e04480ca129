"""The protocol of cache managers: where sequences keep their keys and values.

A slot holds the computed positions of one sequence. A forward receives a view of the slots it serves.
"""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from onward.cache import AdapterRef
from onward.cache.disk import Restoration
from onward.cache.slot import CacheStats, CacheView, Ids
from onward.models import Cache

Slot = Any


class CacheManager(Protocol):
    """Allocates slots for sequences. Capacity is counted in blocks.

    lock: held by callers from `view` to `accept`.
    weights_version: the last key of `set_weights_version`.
    whole: whether every forward gets all rows, padded to one length, because the cache's row dimension is unknown.
    shares_rows: whether several rows of a view may belong to one slot.
    """

    lock: threading.RLock
    whole: bool
    shares_rows: bool
    weights_version: object

    @property
    def max_len(self) -> int | None:
        """The most positions of a slot; None if unknown."""

    @property
    def nbytes(self) -> int:
        """The most memory that the cache takes."""

    def acquire(
        self,
        ids: Sequence[int],
        length: int,
        *,
        reuse: bool = True,
        adapter: AdapterRef | None = None,
        salt: str | None = None,
        pin: Slot | None = None,
    ) -> tuple[Slot, int] | None:
        """Allocate a slot for `length` positions. Returns it with the number of ids it already holds, at most all but
        the last; None, with nothing changed, if there is no room now.

        reuse: whether to look for cached ids. adapter: the adapter that computes the slot's keys and values; forks
        inherit it. salt: only ids with an equal one are reused. pin: a pinned slot, whose ids may be reused like all
        others, and which is released.
        """

    def restoration(self, slot: Slot) -> Restoration | None:
        """The reading of what a new slot can have from a disk, beyond the ids that `acquire` returned. It runs before
        the slot's first forward, in any thread, and without `lock`; then call `finish`. None if there is nothing."""

    def finish(self, restoration: Restoration) -> int:
        """Let the slot have what was read. Returns the number of ids that it holds then; 0 if nothing was read."""

    def fork(self, slot: Slot, positions: int, length: int) -> Slot | None:
        """A slot of `length` positions that holds the first `positions` of another. None if there is no room, the
        cache's rows cannot be copied, or the recurrent states at that position are gone."""

    def reserve(self, slot: Slot, length: int) -> bool:
        """Make room for `length` positions. Returns False if there is none now."""

    def commit(self, slot: Slot, computed: int, ids: Ids) -> None:
        """Mark the first `computed` positions as final. Those after them will be written again."""

    def release(self, slot: Slot, ids: Sequence[int] = (), pin: bool = False) -> None:
        """Release a slot whose first positions hold these ids. The garbage collector may call this at any moment, in
        any thread: if the manager is in use, it does this later.

        pin: keep what the slot holds of the ids until the slot is released again, or given to `acquire`.
        """

    def pinned(self, pin: Slot) -> int:
        """The number of ids that a pinned slot keeps; 0 once they cannot be reused."""

    def read(self, source: Slot, positions: int) -> Cache:
        """The first positions of a slot, pinned or not, as a dense cache of one row."""

    def read_keys(self, slot: Slot, layer: int, first: int, last: int) -> Tensor:
        """The keys of a layer without a window at the positions first … last - 1 of a slot, [G, N, width], in the
        format of their dtype. Only for the caches of `onward.cache`."""

    def max_chunk(self, slot: Slot, first: int, count: int) -> int:
        """How many of `count` prompt ids, from position `first` of a slot on, to process at once."""

    def room(self, slots: Sequence[Slot], computed: Sequence[int]) -> int | None:
        """The most tokens per row in one forward if any of them may be removed again; None if unknown."""

    def groups(self, slots: Sequence[Slot], tokens: int) -> list[list[int]]:
        """Group the slots, by index, that one forward of `tokens` tokens per row can serve together."""

    def view(self, slots: Sequence[Slot], firsts: Sequence[int], tokens: int) -> CacheView:
        """The cache of these slots, for a forward that writes `tokens` tokens per row from each slot's first position
        on. The cache is the same object as before while its rows are the same."""

    def accept(self, view: CacheView, cache: Cache) -> None:
        """Accept the cache that a forward returned for a view."""

    def cost(self, length: int, shared: int = 0) -> int:
        """The number of blocks that a slot of `length` positions takes if it shares the first `shared` with another."""

    def cost_of(self, slots: Sequence[Slot]) -> int:
        """The number of blocks that these slots use together."""

    def stats(self) -> CacheStats: ...

    def set_weights_version(self, key: object) -> None:
        """Name the weights that compute new entries. A different key makes all cached entries unreachable."""


class Pinned(Protocol):
    """A session's prefix (`onward.decoding.shared_cache.PinnedPrefix`). pin: its slot, if it has one."""

    pin: Slot | None

    def keep(self, slot: Slot, ids: Sequence[int]) -> None:
        """Release a slot whose first positions hold these ids, and pin them."""
