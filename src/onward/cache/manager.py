"""The paged cache manager: slots, their views for forwards, and what becomes of their positions."""

import operator
from collections.abc import Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from onward.cache.block_kinds import SlidingWindow
from onward.cache.disk import Restoration
from onward.cache.slot import CacheView, Ids, Slot
from onward.cache.slot_manager import SlotManager
from onward.errors import ContextOverflowError, RequestError


class PagedCacheManager(SlotManager):
    """A `onward.decoding.CacheManager` over a pool of blocks. The caller of a forward over a `view` holds `lock`."""

    whole = False

    def commit(self, slot: Slot, computed: int, ids: Ids) -> None:
        """Mark the first `computed` positions as final, which adds full blocks to the prefix index. Call it after every
        step: it returns immediately unless a block has become full."""
        if computed < slot.note_at:  # another thread may change note_at; then this is done a block later
            return
        assert computed <= slot.length, (computed, slot.length)
        with self._change(slot):
            self._insert(slot, ids(0, computed))
            for kind in self._windows:
                kind.pass_on(slot, computed)
            self._set_note_at(slot, computed // self.block)

    def restoration(self, slot: Slot) -> Restoration | None:
        """The reading of what only the store has of a new slot's text; None if it has no more. `finish` it."""
        path, slot.stored = slot.stored, None
        return None if path is None or self.disk is None else Restoration(self.disk, slot, path)

    def finish(self, restoration: Restoration) -> int:
        """Make the blocks final that were read. Returns the number of positions that the slot has then; 0 if none were
        read."""
        slot, end, path = restoration.slot, restoration.end, restoration.path
        if end:
            with self._change(slot):
                for kind in self._windows:
                    kind.restore(slot, end // self.block, self._allocator)
                restoration.place()
                self._hits += end - path.positions
                self.disk_counts.restored += end - path.positions
            self.commit(slot, end, lambda first, last: path.ids[first:last])
        return end

    def view(self, slots: Sequence[Slot], firsts: Sequence[int], tokens: int) -> CacheView:
        """The cache of these rows, in order, for a forward of `tokens` tokens per row from each slot's first position
        on; valid until the next `view`. Raises `ContextOverflowError` if the sliding-window blocks of these positions
        exceed `max_chunk` and there is no room."""
        with self.lock:
            for kind in self._windows:
                for slot, first in zip(slots, firsts, strict=True):
                    self._provide(kind, slot, first, first + tokens)
            return CacheView(self._tables.view(slots), range(len(slots)))

    def _provide(self, kind: SlidingWindow, slot: Slot, first: int, last: int) -> None:
        """Allocate the window blocks of the positions first … last - 1."""
        missing = kind.missing(slot, first, last)
        if missing:
            with self._change(slot):
                if not kind.provide(slot, missing, self._allocator):
                    raise ContextOverflowError(
                        f"{last - first} positions at once need more sliding-window blocks than are left: process fewer"
                    )

    def accept(self, view: CacheView, cache: Any) -> None:
        """Raise `RequestError` unless the forward wrote to the blocks in place and returned the same tensors."""
        if cache is view.cache:
            return
        returned, own = tree_leaves(cache), tree_leaves(view.cache)
        if len(returned) != len(own) or any(map(operator.is_not, returned, own)):
            raise RequestError(
                "a forward over a cache in blocks must write to it in place and return it, and this one returned "
                "another: give its Model new_blocks=None, so that it gets the caches of new_cache"
            )

    def groups(self, slots: Sequence[Slot], tokens: int) -> list[list[int]]:
        return [list(range(len(slots)))]

    def room(self, slots: Sequence[Slot], computed: Sequence[int]) -> int:
        return min(self.max_len - max(computed), *(kind.max_step for kind in self._kinds))

    def max_chunk(self, slot: Slot | None, first: int, count: int) -> int:
        """How many of `count` prompt ids, from position `first` on, to process at once: as many as there are window
        blocks for, up to where states can be cached. Without a slot (a search with running beams) count is 1."""
        if slot is None:
            return count
        for window in self._windows:
            with self._change(slot):
                count = window.max_chunk(slot, first, count, self._allocator)
        for states in self._states:
            count = states.max_chunk(slot, first, count)
        return count

    def read(self, slot: Slot, positions: int) -> Any:
        """A copy of a slot's first positions as a dense cache of one row."""
        with self.lock:
            return self._memory.read(slot, positions)

    def read_keys(self, slot: Slot, layer: int, first: int, last: int) -> Any:
        """The keys of a layer without a window at the positions first … last - 1, [G, N, width]."""
        with self.lock:
            return self._memory.read_keys(slot, layer, first, last)

    def write(self, slot: Slot, cache: Any, positions: int) -> None:
        """Copy the first positions of a dense cache of one row to a slot without shared blocks."""
        with self.lock:
            for kind in self._windows:
                self._provide(kind, slot, kind.seen(positions).start * self.block, positions)
            self._memory.write(slot, cache, positions)
