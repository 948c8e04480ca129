"""Where sequences keep their keys and values: the protocol, and rows of a dense cache.

A slot holds the computed positions of one sequence. What a forward gets is a view of the slots that it serves.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache import KVBlocks, KVCache, RowAdapter, length_of
from onward.cache.budget import Prices
from onward.cache.buffers import is_lazy
from onward.cache.positions import copy_positions, position_dims
from onward.cache.rows import copy_row, have_rows, row_dims
from onward.cache.slot import index_of
from onward.cache.slots import PagedSlots
from onward.cache.view import View
from onward.errors import RequestError
from onward.models import Cache, Model, NewBlocks, padded_length
from onward.models.weights_version import computation
from onward.native.machine_memory import memory_limit
from onward.ops.blocks import BLOCK
from onward.ops.state import STATE_BLOCK

Slot = Any
# (first, last) -> the ids at the positions first … last - 1 of a slot
Ids = Callable[[int, int], Sequence[int]]


class Slots(Protocol):
    """Keeps keys and values of sequences.

    lock: held by callers from `view_of` to `put`.
    total: how many blocks there are; a block is what a slot takes room by. available: those that can be had now.
    cached: those of them that hold what may be found. hits, lookups: ids that were found so, and that were looked for.
    whole: whether a forward always gets all rows, padded to one length, for the cache does not show where its rows are.
    shares_rows: whether several rows of a view may be those of one slot.
    """

    lock: threading.RLock
    whole: bool
    shares_rows: bool

    @property
    def total(self) -> int: ...

    @property
    def available(self) -> int: ...

    @property
    def cached(self) -> int: ...

    hits: int
    lookups: int

    def blocks_for(self, length: int) -> int:
        """How many blocks a slot of so many positions takes."""
        ...

    def shared_blocks(self, positions: int) -> int:
        """How many of them a fork at so many positions shares with the slot that it is a fork of."""
        ...

    def blocks_of(self, slots: Sequence[Slot]) -> int:
        """How many blocks these slots hold together."""
        ...

    def acquire(
        self, ids: Sequence[int], length: int, *, reuse: bool = True, adapter: RowAdapter | None = None
    ) -> tuple[Slot, int] | None:
        """A slot for `length` positions, and how many of these ids it holds already, at most all but the last.

        adapter: that the slot's keys and values are computed with, for as long as it lives; forks have it too.
        None: there is no room now; nothing has changed.
        """
        ...

    def fork(self, slot: Slot, positions: int, length: int) -> Slot | None:
        """A slot of its own for `length` positions that holds the first `positions` of another. None: there is no room,
        the cache's rows cannot be copied, or it has no recurrent states of so many positions any more."""
        ...

    def reserve(self, slot: Slot, length: int) -> bool:
        """Make room for `length` positions. False: there is none now."""
        ...

    def holds(self, slot: Slot, positions: int) -> bool:
        """Whether the slot could go on from so many positions, which it has held: it could not where the recurrent
        states of so many are not there any more."""
        ...

    def truncate(self, slot: Slot, positions: int) -> None:
        """Forget what the slot holds from `positions` on, which will be written anew."""
        ...

    def advance(self, slot: Slot, computed: int, ids: Ids) -> None:
        """Note that the first `computed` positions are final. ids: (first, last) -> the ids that they hold."""
        ...

    def release(self, slot: Slot, ids: Sequence[int] = ()) -> None:
        """Let a slot go, whose first positions hold these ids."""
        ...

    def leave(self, slot: Slot, ids: Sequence[int] = ()) -> None:
        """`release` for the garbage collector, which may call it in the midst of any other method."""
        ...

    def groups(self, slots: Sequence[Slot], tokens: int) -> list[list[int]]:
        """Which of the slots, by index, one forward of `tokens` tokens a row serves together."""
        ...

    def use(self, key: object) -> None:
        """Say which weights compute what is kept from now on. Another key than before: nothing kept is found."""
        ...

    def room(self, slots: Sequence[Slot], computed: Sequence[int]) -> int | None:
        """How many tokens a row one forward over these slots may process, each from what it has computed on, if any of
        them may be taken back; None if unknown."""
        ...

    def piece(self, slot: Slot, first: int, count: int) -> int:
        """How many of `count` ids of a prompt, from position `first` of a slot on, to process at once."""
        ...

    def ready(self, slots: Sequence[Slot], firsts: Sequence[int], tokens: int) -> None:
        """See that a forward may write so many tokens of each slot from its first position on: as many as `piece` says,
        or as `room` does. To be called before `view_of`."""
        ...

    def view_of(self, slots: Sequence[Slot], tokens: int) -> View:
        """The cache that a forward of so many tokens a row over these slots gets."""
        ...

    def put(self, view: View, cache: Cache) -> None:
        """Take the cache that a forward returned for a view."""
        ...


class DenseSlot:
    """row: of the cache. filled: how many positions it holds. used: whether a sequence has it.
    written: the position after those that a forward has written, before `advance` says how many of them hold.
    adapter: that the row is computed with.
    """

    def __init__(self, row: int, filled: int = 0, adapter: RowAdapter | None = None) -> None:
        self.row, self.filled, self.written, self.used, self.adapter = row, filled, filled, True, adapter


class DenseSlots:
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
        self._slots: list[DenseSlot | None] = [None] * rows
        self._views: dict[tuple[int, int], Cache] = {}
        self._adapters: dict[tuple[int, int], Tensor] = {}
        self._viewed: list[tuple[DenseSlot, int]] = []  # by the last view, each with the position after its tokens

    @classmethod
    def of(cls, model: Model, rows: int, length: int) -> "DenseSlots":
        """A cache of one's own, of `rows` rows of `length` positions or more."""
        padded = padded_length(length, model)
        cache = model.new_cache(rows, padded)
        return cls(cache, rows, padded, dims_of(model, cache, rows), model)

    @classmethod
    def given(cls, model: Model, cache: Cache, rows: int, filled: Sequence[int] | None = None) -> "DenseSlots":
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

    def blocks_of(self, slots: Sequence[DenseSlot]) -> int:
        return len(slots)

    def acquire(
        self, ids: Sequence[int], length: int, *, reuse: bool = True, adapter: RowAdapter | None = None
    ) -> tuple[DenseSlot, int] | None:
        row = next((row for row, slot in enumerate(self._slots) if slot is None or not slot.used), None)
        if row is None or (self._model is not None and not self._make_room(length)):
            return None
        slot = self._slots[row] = DenseSlot(row, self._filled[row], adapter)
        return slot, 0

    def fork(self, slot: DenseSlot, positions: int, length: int) -> DenseSlot | None:
        if self._dims is None or not self.holds(slot, positions):
            return None
        if (acquired := self.acquire((), length, adapter=slot.adapter)) is None:
            return None
        fork, _ = acquired
        self._copy(slot.row, fork.row, positions)
        fork.filled = fork.written = positions
        return fork

    def reserve(self, slot: DenseSlot, length: int) -> bool:
        return self._model is None or self._make_room(length)

    def holds(self, slot: DenseSlot, positions: int) -> bool:
        return not isinstance(self.cache, KVCache) or self.cache.holds(slot.row, positions)

    def truncate(self, slot: DenseSlot, positions: int) -> None:
        slot.filled = slot.written = min(slot.filled, positions)

    def advance(self, slot: DenseSlot, computed: int, ids: Ids) -> None:
        slot.filled = slot.written = computed

    def release(self, slot: DenseSlot, ids: Sequence[int] = ()) -> None:
        slot.used = False
        if self._model is not None:
            self._slots[slot.row] = None

    def leave(self, slot: DenseSlot, ids: Sequence[int] = ()) -> None:
        self.release(slot, ids)

    def groups(self, slots: Sequence[DenseSlot], tokens: int) -> list[list[int]]:
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

    def use(self, key: object) -> None:
        """Nothing is kept of slots that were let go."""

    def room(self, slots: Sequence[DenseSlot], computed: Sequence[int]) -> int | None:
        length = length_of(self.cache) or self.length
        others = [slot.filled for slot in self._slots if slot is not None and self.whole]
        room = None if length is None else length - max([*computed, *others])
        if isinstance(self.cache, KVCache) and self.cache.states:
            return STATE_BLOCK if room is None else min(room, STATE_BLOCK)
        return room

    def piece(self, slot: DenseSlot, first: int, count: int) -> int:
        return count

    def ready(self, slots: Sequence[DenseSlot], firsts: Sequence[int], tokens: int) -> None:
        """A row has memory for all of its positions."""

    def view_of(self, slots: Sequence[DenseSlot], tokens: int) -> View:
        self._viewed = [(slot, slot.filled + tokens) for slot in slots]
        if self.rows == 1:
            return View(self._adapted(self.cache, 0, 1), (0,))
        rows = [slot.row for slot in slots]
        first, last = (0, self.rows) if self.whole else (min(rows), max(rows) + 1)
        cache = self._adapted(self._narrowed(first, last - first), first, last - first)
        places = [row - first for row in rows]
        if places == list(range(last - first)):
            return View(cache, places)
        offsets = [0 if slot is None else slot.written for slot in self._slots[first:last]]
        return View(cache, places, offsets)

    def put(self, view: View, cache: Cache) -> None:
        """Keep what a forward returned. It may have made new tensors, and for some rows alone."""
        for slot, end in self._viewed:
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


# The most blocks of a memory. Each costs some bytes of accounts, also one that is never used.
MOST_BLOCKS = 2**15


def slots_for(model: Model, rows: int, length: int) -> Slots:
    """Slots of one's own for `rows` sequences of at most `length` positions."""
    if model.new_blocks is None:
        return DenseSlots.of(model, rows, length)
    return PagedSlots(
        model.new_blocks(rows * -(-length // BLOCK)), max_len=longest_text(model, length), cached_blocks=0
    )


def longest_text(model: Model, length: int) -> int:
    """How many positions a table of blocks has room for: as many for every call, so that all calls share programs."""
    return padded_length(length, model) if model.max_seq_len is None else model.max_seq_len


class KeptSlots:
    """The slots that the calls of one owner share, so that prompts which begin alike are not processed twice.

    memory: the most bytes of keys and values that are kept between calls; 0 keeps none.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self._slots: PagedSlots | None = None
        self._model: weakref.ref[Model] | None = None

    def of(self, model: Model, rows: int, length: int) -> Slots:
        """Slots for `rows` sequences of at most `length` positions. Where the shared ones have no room for them, or the
        model's cache is not in blocks, they are the call's own."""
        if model.new_blocks is None or not self.memory:
            return slots_for(model, rows, length)
        slots = self._shared(model, length)
        if rows * slots.blocks_for(length) > slots.available or length > slots.max_len:
            return slots_for(model, rows, length)
        slots.use(computation(model))
        return slots

    def _shared(self, model: Model, length: int) -> PagedSlots:
        if self._slots is None or self._model is None or self._model() is not model:
            assert model.new_blocks is not None, "asked before"
            # Memory that is never written is never allocated on the CPU, so all of the machine's may be asked for.
            limit = memory_limit()
            limit = limit if is_lazy(limit, model.device) else self.memory
            blocks = blocks_within(model.new_blocks, limit, MOST_BLOCKS, model.device)
            self._slots = PagedSlots(
                blocks,
                max_len=longest_text(model, length),
                cached_blocks=min(self.memory, limit) // Prices.of(blocks).unit,
                nbytes=limit,
            )
            self._model = weakref.ref(model)
        return self._slots


def blocks_within(new_blocks: NewBlocks, nbytes: int, most: int, device: torch.device) -> KVBlocks:
    """Memory of at most so many bytes, and of at most `most` blocks of each kind, one at least.

    On the CPU, where memory that is not written is not taken, each kind may have all of it, since slots bound them
    together. Elsewhere both kinds have equally many. Where the system refuses so much, for a process may be limited, it
    is less.
    """
    one = new_blocks(1)
    whole, window = one.block_nbytes, 0 if one.windows is None else one.windows.block_nbytes
    if device.type != "cpu":
        whole = window = whole + window
    count, windows = (max(1, min(nbytes // each, most)) if each else most for each in (whole, window))
    while max(count, windows) > 1:
        try:
            return new_blocks(count) if one.windows is None else new_blocks(count, windows)
        except RequestError:
            count, windows = -(-count // 2), -(-windows // 2)
    return one


def dims_of(model: Model, cache: Cache, rows: int) -> Sequence[int] | None:
    """The dimension of rows in each tensor of a cache that `model` or a caller made; None where it does not show."""
    if isinstance(cache, KVCache):
        return [0] * (2 * len(cache.keys) + len(cache.states))
    if rows == 1:
        return None
    dims = row_dims(model.new_cache)
    return dims if dims is not None and have_rows(cache, dims, rows) else None
