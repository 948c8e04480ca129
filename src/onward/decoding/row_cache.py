"""Slots that are rows of a dense cache."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache import AdapterRef, KVCache, length_of
from onward.cache.dense import copy_positions, copy_row, have_rows, position_dims, row_dims
from onward.cache.slot import CacheView, index_of
from onward.decoding.cache_manager import Ids
from onward.errors import RequestError
from onward.models import Cache, Model, padded_length
from onward.ops.recurrent_state import STATE_BLOCK


class CacheRow:
    """row: of the cache. filled: how many positions it holds. used: whether a sequence has it.
    written: the position after those that a forward has written, before `advance` says how many of them hold.
    adapter: that the row is computed with.
    """

    def __init__(self, row: int, filled: int = 0, adapter: AdapterRef | None = None) -> None:
        self.row, self.filled, self.written, self.used, self.adapter = row, filled, filled, True, adapter


class RowCacheManager:
    """Rows of one cache, which may be anyone's pytree.

    Each row is of one slot (`shares_rows` is False).

    cache: of `rows` rows. length: positions of a row; None if unknown.
    dims: the dimension of rows in each tensor of the cache; None where it does not show it. Then rows are neither
        moved nor copied, and every forward gets all of them.
    model: makes a longer cache where `reserve` asks for it. Only for a cache of one's own, whose rows may move.
    filled: how many positions each row holds at first; none by default.
    """

    shares_rows = False

    def __init__(
        self,
        cache: Cache,
        rows: int,
        length: int | None,
        dims: Sequence[int] | None,
        model: Model | None = None,
        filled: Sequence[int] | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.hits = self.lookups = 0
        self.cache = cache
        self.rows, self.length = rows, length
        self.whole = dims is None and rows > 1
        self._dims = dims
        self._model = model
        self._filled = [0] * rows if filled is None else filled
        self._slots: list[CacheRow | None] = [None] * rows
        self._views: dict[tuple[int, int], Cache] = {}
        self._adapters: dict[tuple[int, int], Tensor] = {}
        self._ready: list[tuple[CacheRow, int]] = []  # for the next view, each with the position after its tokens

    @classmethod
    def of(cls, model: Model, rows: int, length: int) -> "RowCacheManager":
        """A cache of one's own, of `rows` rows of `length` positions or more."""
        padded = padded_length(length, model)
        cache = model.new_cache(rows, padded)
        return cls(cache, rows, padded, dims_of(model, cache, rows), model)

    @classmethod
    def given(cls, model: Model, cache: Cache, rows: int, filled: Sequence[int] | None = None) -> "RowCacheManager":
        """The caller's cache, of which each row holds so many positions. Its rows keep their places."""
        return cls(cache, rows, None, dims_of(model, cache, rows), filled=filled)

    @property
    def total(self) -> int:
        return self.rows

    @property
    def cached(self) -> int:
        return 0

    @property
    def available(self) -> int:
        return sum(slot is None or not slot.used for slot in self._slots)

    def blocks_for(self, length: int) -> int:
        """A row, if it is long enough."""
        return 1 if self.length is None or length <= self.length else self.rows + 1

    def shared_blocks(self, positions: int) -> int:
        return 0

    def blocks_of(self, slots: Sequence[CacheRow]) -> int:
        return len(slots)

    def acquire(
        self, ids: Sequence[int], length: int, *, reuse: bool = True, adapter: AdapterRef | None = None
    ) -> tuple[CacheRow, int] | None:
        row = next((row for row, slot in enumerate(self._slots) if slot is None or not slot.used), None)
        if row is None or (self._model is not None and not self._make_room(length)):
            return None
        slot = self._slots[row] = CacheRow(row, self._filled[row], adapter)
        return slot, 0

    def fork(self, slot: CacheRow, positions: int, length: int) -> CacheRow | None:
        if self._dims is None or not self.holds(slot, positions):
            return None
        if (acquired := self.acquire((), length, adapter=slot.adapter)) is None:
            return None
        fork, _ = acquired
        self._copy(slot.row, fork.row, positions)
        fork.filled = fork.written = positions
        return fork

    def reserve(self, slot: CacheRow, length: int) -> bool:
        return self._model is None or self._make_room(length)

    def holds(self, slot: CacheRow, positions: int) -> bool:
        return not isinstance(self.cache, KVCache) or self.cache.holds(slot.row, positions)

    def truncate(self, slot: CacheRow, positions: int) -> None:
        slot.filled = slot.written = min(slot.filled, positions)

    def advance(self, slot: CacheRow, computed: int, ids: Ids) -> None:
        slot.filled = slot.written = computed

    def release(self, slot: CacheRow, ids: Sequence[int] = ()) -> None:
        slot.used = False
        if self._model is not None:
            self._slots[slot.row] = None

    def release_later(self, slot: CacheRow, ids: Sequence[int] = ()) -> None:
        self.release(slot, ids)

    def groups(self, slots: Sequence[CacheRow], tokens: int) -> list[list[int]]:
        """One token a row: all of them, for what the other rows write is never read. More: neighbouring rows."""
        if self._model is not None and self._dims is not None:
            self._close_gaps()
        order = sorted(range(len(slots)), key=lambda index: slots[index].row)
        if tokens == 1 or self.whole:
            return [order]
        groups = [[order[0]]]
        for index in order[1:]:
            if slots[index].row == slots[groups[-1][-1]].row + 1:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def set_weights_version(self, key: object) -> None:
        """Nothing is kept of slots that were let go."""

    def max_step_tokens(self, slots: Sequence[CacheRow], computed: Sequence[int]) -> int | None:
        length = length_of(self.cache) or self.length
        others = [slot.filled for slot in self._slots if slot is not None and self.whole]
        room = None if length is None else length - max([*computed, *others])
        if isinstance(self.cache, KVCache) and self.cache.states:
            return STATE_BLOCK if room is None else min(room, STATE_BLOCK)
        return room

    def max_chunk(self, slot: CacheRow, first: int, count: int) -> int:
        return count

    def ensure_writable(self, slots: Sequence[CacheRow], firsts: Sequence[int], tokens: int) -> None:
        """A row has memory for all of its positions. Where its tokens end is noted: a step may run a row twice before
        its slot advances (a search's prompt, then the last id)."""
        self._ready = [(slot, first + tokens) for slot, first in zip(slots, firsts, strict=True)]

    def view_of(self, slots: Sequence[CacheRow], tokens: int) -> CacheView:
        if self.rows == 1:
            return CacheView(self._adapted(self.cache, 0, 1), (0,))
        rows = [slot.row for slot in slots]
        first, last = (0, self.rows) if self.whole else (min(rows), max(rows) + 1)
        cache = self._adapted(self._narrowed(first, last - first), first, last - first)
        places = [row - first for row in rows]
        if places == list(range(last - first)):
            return CacheView(cache, places)
        offsets = [0 if slot is None else slot.written for slot in self._slots[first:last]]
        return CacheView(cache, places, offsets)

    def check_written(self, view: CacheView, cache: Cache) -> None:
        """Keep what a forward returned. It may have made new tensors, and for some rows alone."""
        for slot, end in self._ready:
            slot.written = end
        if cache is view.cache:
            return
        if view.cache is self.cache:
            self.cache, self._views = cache, {}
            return
        for leaf, new in zip(pytree.tree_leaves(view.cache), pytree.tree_leaves(cache), strict=True):
            if new is not leaf:
                leaf.copy_(new)

    def _adapted(self, cache: Cache, first: int, count: int) -> Cache:
        """The cache of some rows with the index of the adapter of each, where one has one."""
        indices = [0 if slot is None else index_of(slot.adapter) for slot in self._slots[first : first + count]]
        if not any(indices):
            return cache
        if not isinstance(cache, KVCache):
            raise RequestError(f"an adapter needs a cache that new_cache made; got {type(cache).__name__}")
        key, device = (first, count), pytree.tree_leaves(cache)[0].device
        if key not in self._adapters:  # it is kept, as a view is
            self._adapters[key] = torch.zeros(count, dtype=torch.int32, device=device)
        self._adapters[key].copy_(torch.tensor(indices, dtype=torch.int32))
        return cache._replace(adapters=(self._adapters[key],))

    def _narrowed(self, first: int, count: int) -> Cache:
        """The cache of some rows, over the same memory. It is kept, for a program knows a cache by its tensors."""
        if count == self.rows:
            return self.cache
        assert self._dims is not None, "the rows of this cache are not known"
        key = first, count
        if key not in self._views:
            if len(self._views) > 2 * self.rows:
                self._views.clear()
            leaves, spec = pytree.tree_flatten(self.cache)
            parts = [leaf.narrow(dim, first, count) for leaf, dim in zip(leaves, self._dims, strict=True)]
            self._views[key] = pytree.tree_unflatten(parts, spec)
        return self._views[key]

    def _close_gaps(self) -> None:
        """Move rows from the end into those that are free, so that a forward over all costs no more than they need."""
        while True:
            used = [row for row, slot in enumerate(self._slots) if slot is not None]
            free = next((row for row, slot in enumerate(self._slots) if slot is None), self.rows)
            if not used or used[-1] < free:
                return
            slot = self._slots[used[-1]]
            assert slot is not None
            self._copy(slot.row, free, slot.written)  # a forward of this step may have written it
            self._slots[free], self._slots[slot.row] = slot, None
            slot.row = free

    def _copy(self, source: int, to: int, positions: int) -> None:
        """Copy a row of the cache, of which `positions` count."""
        assert self._dims is not None, "the rows of this cache are not known"
        if isinstance(self.cache, KVCache):
            self.cache.copy_row(source, to, positions)
        else:
            copy_row(self.cache, self._dims, source, to)

    def _make_room(self, length: int) -> bool:
        """Make the cache longer where it must be. It at least doubles, so a text that grows is copied twice at most."""
        assert self._model is not None
        assert self.length is not None
        if length <= self.length:
            return True
        model, limit = self._model, self._model.max_seq_len
        doubled = 2 * self.length if limit is None else min(2 * self.length, limit)
        longer = max(padded_length(length, model), doubled)
        cache = model.new_cache(self.rows, longer)
        filled = max((slot.written for slot in self._slots if slot is not None), default=0)
        dims = position_dims(self.cache, self.length, cache, longer)
        if dims is not None:
            copy_positions(self.cache, cache, dims, filled)
        elif filled:
            return False  # the cache does not show which dimension its positions are in
        self.cache, self.length, self._views = cache, longer, {}
        return True


def dims_of(model: Model, cache: Cache, rows: int) -> Sequence[int] | None:
    """The dimension of rows in each tensor of a cache that `model` or a caller made; None where it does not show."""
    if isinstance(cache, KVCache):
        return [0] * (2 * len(cache.keys) + len(cache.states))
    if rows == 1:
        return None
    dims = row_dims(model.new_cache)
    return dims if dims is not None and have_rows(cache, dims, rows) else None
