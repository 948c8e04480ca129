"""Slots in the rows of a dense cache."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache import AdaptedCache, AdapterRef, KVCache, length_of
from onward.cache.dense import copy_positions, copy_row, have_rows, position_dims, row_dims
from onward.cache.disk import Restoration
from onward.cache.slot import CacheStats, CacheView, Ids, index_of, root_of
from onward.models import Cache, Model, padded_length
from onward.models.model import CPU
from onward.ops.recurrent_state import STATE_BLOCK


@dataclass(eq=False)
class CacheRow:
    """A row of the cache, and its slot. used: whether a sequence or a pin has it. root: of its text (`root_of`). ids:
    those of a pin.

    filled: the number of computed positions. written_end: the position after those written by a forward, before
    `commit` says how many of them are final.
    """

    row: int
    filled: int = 0
    written_end: int = 0
    used: bool = False
    adapter: AdapterRef | None = None
    root: str = ""
    ids: Sequence[int] = ()


class RowCacheManager:
    """A `CacheManager` over the rows of one cache, which may be any pytree. Each row is one slot.

    max_len: positions per row; None if unknown.
    dims: the row dimension of each tensor in the cache; None if unknown: then rows are never moved or copied, and every
        forward gets all of them.
    model: allocates a longer cache on `reserve`. Only for a cache that the manager owns, since rows may move.
    filled: the number of positions that each row already holds; by default none.
    """

    shares_rows = False
    weights_version: object = None

    def __init__(
        self,
        cache: Cache,
        rows: int,
        max_len: int | None,
        dims: Sequence[int] | None,
        model: Model | None = None,
        filled: Sequence[int] | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.cache, self.rows, self.max_len, self.model = cache, rows, max_len, model
        self.whole = dims is None and rows > 1
        self._dims = dims
        self._slots = [CacheRow(row, count, count) for row, count in enumerate(filled or [0] * rows)]
        self._views: dict[tuple[int, int], Cache] = {}
        self._adapters: dict[tuple[int, int], Tensor] = {}
        self._ends: list[tuple[CacheRow, int]] = []  # of the tokens of the last view

    @classmethod
    def allocate(cls, model: Model, rows: int, length: int) -> "RowCacheManager":
        """A new cache of `rows` rows of at least `length` positions."""
        padded = padded_length(length, model)
        cache = model.new_cache(rows, padded)
        return cls(cache, rows, padded, dims_of(model, cache, rows), model)

    @classmethod
    def wrap(cls, model: Model, cache: Cache, rows: int, filled: Sequence[int] | None = None) -> "RowCacheManager":
        """A caller's cache, whose rows are never moved."""
        return cls(cache, rows, None, dims_of(model, cache, rows), filled=filled)

    def stats(self) -> CacheStats:
        return CacheStats(self.rows, sum(not slot.used for slot in self._slots), 0)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(self.cache) if isinstance(leaf, Tensor))

    def cost(self, length: int, shared: int = 0) -> int:
        return 1 if self.max_len is None or length <= self.max_len else self.rows + 1

    def cost_of(self, slots: Sequence[CacheRow]) -> int:
        return len(slots)

    def acquire(
        self,
        ids: Sequence[int],
        length: int,
        *,
        reuse: bool = True,
        adapter: AdapterRef | None = None,
        salt: str | None = None,
        pin: CacheRow | None = None,
    ) -> tuple[CacheRow, int] | None:
        slot = pin or next((slot for slot in self._slots if not slot.used), None)
        if slot is None:
            return None
        reused, before = 0, slot.filled
        root = root_of(adapter, salt)
        if reuse and pin is not None and pin.root == root:
            reused = min(_common_prefix(pin.ids, ids), len(ids) - 1)
            reused = reused if self._holds(pin, reused) else 0
        if self.model is not None:
            slot.filled = slot.written_end = reused
            if not self.reserve(slot, length):
                slot.filled = slot.written_end = reused = 0  # what cannot be copied is computed again
                if not self.reserve(slot, length):
                    slot.filled = slot.written_end = before
                    return None
        slot.used, slot.written_end, slot.adapter, slot.root, slot.ids = True, slot.filled, adapter, root, ()
        return slot, reused

    def restoration(self, slot: CacheRow) -> None:
        """None: rows are not on the disk."""

    def finish(self, restoration: Restoration) -> int:
        raise AssertionError("a row has no restoration")

    def fork(self, slot: CacheRow, positions: int, length: int) -> CacheRow | None:
        if self._dims is None or not self._holds(slot, positions):
            return None
        if (acquired := self.acquire((), length, adapter=slot.adapter)) is None:
            return None
        fork, _ = acquired
        fork.root = slot.root
        self._copy(slot.row, fork.row, positions)
        fork.filled = fork.written_end = positions
        return fork

    def reserve(self, slot: CacheRow, length: int) -> bool:
        """Lengthen the cache if necessary. It at least doubles, so a growing sequence is copied at most twice."""
        if self.model is None or self.max_len is None or length <= self.max_len:
            return True
        doubled = 2 * self.max_len if self.model.max_seq_len is None else min(2 * self.max_len, self.model.max_seq_len)
        longer = max(padded_length(length, self.model), doubled)
        cache, filled = self.model.new_cache(self.rows, longer), max(slot.written_end for slot in self._slots)
        dims = position_dims(self.cache, self.max_len, cache, longer)
        if dims is not None:
            copy_positions(self.cache, cache, dims, filled)
        elif filled:
            return False  # the position dimension is unknown
        self.cache, self.max_len, self._views = cache, longer, {}
        return True

    def commit(self, slot: CacheRow, computed: int, ids: Ids) -> None:
        slot.filled = slot.written_end = computed

    def release(self, slot: CacheRow, ids: Sequence[int] = (), pin: bool = False) -> None:
        slot.used, slot.filled = pin, len(ids) if pin else 0
        if pin or self.model is not None:  # forwards write to a caller's other rows only past what these hold
            slot.written_end = slot.filled
        slot.ids = list(ids) if pin else ()
        slot.adapter = slot.adapter if pin else None

    def pinned(self, pin: CacheRow) -> int:
        return len(pin.ids)

    def read(self, source: CacheRow, positions: int) -> Cache:
        """The cache itself, of one row."""
        assert self.rows == 1, self.rows
        return self.cache

    def read_keys(self, slot: CacheRow, layer: int, first: int, last: int) -> Tensor:
        keys: Tensor = self.cache.keys[layer][slot.row, :, first:last]
        return keys

    def set_weights_version(self, key: object) -> None:
        if key != self.weights_version:
            for slot in self._slots:
                slot.ids = ()
        self.weights_version = key

    def max_chunk(self, slot: CacheRow, first: int, count: int) -> int:
        return count

    def room(self, slots: Sequence[CacheRow], computed: Sequence[int]) -> int | None:
        length = length_of(self.cache) or self.max_len
        others = [slot.written_end for slot in self._slots if self.whole]
        room = None if length is None else length - max([*computed, *others])
        if isinstance(self.cache, KVCache) and self.cache.states:
            return STATE_BLOCK if room is None else min(room, STATE_BLOCK)
        return room

    def groups(self, slots: Sequence[CacheRow], tokens: int) -> list[list[int]]:
        """All slots for one token per row, because writes to the other rows are never read; else neighbouring rows."""
        if self.model is not None and self._dims is not None:
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

    def view(self, slots: Sequence[CacheRow], firsts: Sequence[int], tokens: int) -> CacheView:
        self._ends = [(slot, first + tokens) for slot, first in zip(slots, firsts, strict=True)]
        if self.rows == 1:
            return CacheView(self._adapted(self.cache, 0, 1), (0,))
        rows = [slot.row for slot in slots]
        first, last = (0, self.rows) if self.whole else (min(rows), max(rows) + 1)
        cache = self._adapted(self._narrowed(first, last - first), first, last - first)
        places = [row - first for row in rows]
        if places == list(range(last - first)):
            return CacheView(cache, places)
        return CacheView(cache, places, [slot.written_end for slot in self._slots[first:last]])

    def accept(self, view: CacheView, cache: Cache) -> None:
        """Keep the cache that a forward returned: it may have new tensors, and only some rows."""
        before, cache = _without_adapters(view.cache), _without_adapters(cache)
        for slot, end in self._ends:
            slot.written_end = end  # a step may run a row twice before `commit` (a search's prompt, then its last id)
        if cache is before:
            return
        if before is self.cache:
            self.cache, self._views = cache, {}
            return
        for leaf, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(cache), strict=True):
            if new is not leaf:
                leaf.copy_(new)

    def _adapted(self, cache: Cache, first: int, count: int) -> Cache:
        """The cache of some rows, with the adapter index of each if any row has an adapter."""
        indices = [index_of(slot.adapter) for slot in self._slots[first : first + count]]
        if not any(indices):
            return cache
        key = first, count
        if key not in self._adapters:  # reused, like the views
            tensors = (leaf for leaf in pytree.tree_leaves(cache) if isinstance(leaf, Tensor))
            device = next((tensor.device for tensor in tensors), CPU)
            self._adapters[key] = torch.zeros(count, dtype=torch.int32, device=device)
        self._adapters[key].copy_(torch.tensor(indices, dtype=torch.int32))
        return AdaptedCache(cache, self._adapters[key])

    def _narrowed(self, first: int, count: int) -> Cache:
        """The cache of some rows, over the same memory; reused, because programs identify a cache by its tensors."""
        if count == self.rows:
            return self.cache
        assert self._dims is not None, "the row dimension is unknown"
        key = first, count
        if key not in self._views:
            if len(self._views) > 2 * self.rows:
                self._views.clear()
            leaves, spec = pytree.tree_flatten(self.cache)
            parts = [leaf.narrow(dim, first, count) for leaf, dim in zip(leaves, self._dims, strict=True)]
            self._views[key] = pytree.tree_unflatten(parts, spec)
        return self._views[key]

    def _close_gaps(self) -> None:
        """Move rows from the end into free rows, so that a forward over all rows costs no more than necessary."""
        slots, count = self._slots, sum(slot.used for slot in self._slots)
        for row, free in enumerate(slots[:count]):
            if not free.used:
                last = next(slot for slot in reversed(slots) if slot.used)
                self._copy(last.row, row, last.written_end)  # a forward of this step may have written it
                slots[row], slots[last.row] = last, free
                last.row, free.row = row, last.row

    def _holds(self, slot: CacheRow, positions: int) -> bool:
        return not isinstance(self.cache, KVCache) or self.cache.holds(slot.row, positions)

    def _copy(self, source: int, to: int, positions: int) -> None:
        assert self._dims is not None, "the row dimension is unknown"
        if isinstance(self.cache, KVCache):
            self.cache.copy_row(source, to, positions)
        else:
            copy_row(self.cache, self._dims, source, to)


def dims_of(model: Model, cache: Cache, rows: int) -> Sequence[int] | None:
    """The row dimension of each tensor in a cache made by `model` or a caller; None if unknown."""
    if isinstance(cache, KVCache):
        return [0] * (2 * len(cache.keys) + len(cache.states))
    if rows == 1:
        return None
    dims = row_dims(model.new_cache)
    return dims if dims is not None and have_rows(cache, dims, rows) else None


def _without_adapters(cache: Cache) -> Cache:
    return cache.cache if isinstance(cache, AdaptedCache) else cache


def _common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    length = min(len(ids), len(others))
    # Usually one continues the other, and comparing whole lists is fast.
    if list(ids[:length]) == list(others[:length]):
        return length
    return next(index for index in range(length) if ids[index] != others[index])
