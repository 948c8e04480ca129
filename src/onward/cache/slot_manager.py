"""The slots of a paged cache, which share the blocks of common prefixes.

A `Slot` is a row: a list of blocks for a number of positions. `acquire` finds final blocks through the prefix index
while they are held and, within a budget, afterwards. Blocks that a slot may still write are its own.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from onward.cache.allocator import Allocator, Prefix
from onward.cache.block_kinds import RecurrentStates, SlidingWindow, kinds_of
from onward.cache.disk import CurrentStore, DiskCounts, DiskPrefixes
from onward.cache.paged import BlockTableTensors, KVPool
from onward.cache.prefix_index import PrefixIndex
from onward.cache.slot import (
    NEVER,
    RELEASED,
    AdapterRef,
    CacheStats,
    PrefixMatch,
    PrefixNode,
    Slot,
    root_of,
)  # fmt: skip
from onward.errors import ContextOverflowError
from onward.native import library
from onward.ops.heads import BLOCK
from onward.util.checks import check_whole
from onward.util.process import renew_in_forks, sigint_deferred
from onward.util.text import described

_WARM_BLOCKS = 8


class SlotManager:
    """Allocates slots over a pool of blocks: the part of `PagedCacheManager` that knows no forwards. Every method holds
    `lock`.

    `acquire`, `fork` and `reserve` raise `ContextOverflowError` for a length that never fits.

    Ctrl-C waits for the end of a change. After a failed copy of blocks, all slots are as before, but cached blocks may
    have been evicted for it, and so may the end of a pinned prefix if only that made room. A forked child releases the
    slots of the parent's other threads. If one of these was in the middle of a change, the child's own slots are empty
    too and can only be released.

    Args:
        max_len: the most positions of a slot.
        cached_blocks: the most cached blocks, which no slot holds.
        warm_blocks: how many free blocks keep their memory (`BlockKind`).
        block: positions of a block.
        nbytes: the most memory in use; by default all of the pool.

    shares_rows: True with native kernels: they read blocks shared by rows of one slot once, torch copies them for each.
        Recurrent layers process tokens one by one, so their rows share no slot.
    unit_nbytes: the bytes of a block as it is counted: with sliding layers or recurrent states, a unit of memory, of
        which a sequence takes the worth of everything it holds.
    weights_version: of the weights that compute new entries. disk: what of the prefix index is on the disk, if any.
    """

    def __init__(
        self,
        memory: KVPool,
        *,
        max_len: int,
        cached_blocks: int,
        warm_blocks: int = _WARM_BLOCKS,
        block: int = BLOCK,
        nbytes: int | None = None,
    ) -> None:
        check_whole("max_len", max_len, low=1)
        check_whole("cached_blocks", cached_blocks, low=0)
        check_whole("warm_blocks", warm_blocks, low=0)
        self.lock = threading.RLock()
        self.shares_rows = memory.states is None and memory.device.type == "cpu" and library() is not None
        self.max_len, self.block, self._memory = max_len, block, memory
        self._hits = self._lookups = 0
        self.disk: DiskPrefixes | None = None
        self.disk_counts = DiskCounts()
        if memory.states is not None:
            cached_blocks = -(-cached_blocks // 2)  # their states may take as much
        self._sizes = cached_blocks, warm_blocks, nbytes
        self._tables = BlockTableTensors(memory, -(-max_len // block))
        self.weights_version: object = None
        self._reset()
        renew_in_forks(self)

    def _reset(self) -> None:
        """Begin without slots."""
        cached_blocks, warm_blocks, nbytes = self._sizes
        self._kinds = kinds_of(self._memory, self.block, cached_blocks, warm_blocks)
        self._allocator = Allocator(self._kinds, nbytes, cached_blocks)
        self._index = PrefixIndex(self._allocator, self.block)
        self._windows = [kind for kind in self._kinds if isinstance(kind, SlidingWindow)]
        self._states = [kind for kind in self._kinds if isinstance(kind, RecurrentStates)]
        self._slots: dict[Slot, None] = {}
        self._released: deque[tuple[Slot, Sequence[int], bool]] = deque()
        self._changing = False
        self.unit_nbytes = self._allocator.unit

    def __repr__(self) -> str:
        total, available, cached, *_ = self.stats()
        blocks = f"{total} blocks of {self.block} positions"
        return described(self, blocks, f"{available - cached} free", f"{cached} cached", f"{total - available} held")

    @property
    def nbytes(self) -> int:
        return self._allocator.total * self.unit_nbytes

    def stats(self) -> CacheStats:
        with self.lock:
            self._release_all()
            total, available, cached = self._allocator.total, self._allocator.available, self._allocator.cached
            return CacheStats(total, available, min(available, cached), self._hits, self._lookups)

    def cost(self, length: int, shared: int = 0) -> int:
        return self._allocator.cost(-(-length // self.block)) - shared // self.block * self._kinds[0].price

    def cost_of(self, slots: Sequence[Slot]) -> int:
        return self._allocator.cost_of(slots)

    def can_hold(self, length: int) -> bool:
        """Whether `length` positions could be reserved without any other slot."""
        return length <= self.max_len and self._allocator.can_hold(-(-length // self.block))

    @contextmanager
    def _change(self, slot: Slot | None = None) -> Iterator[None]:
        """Hold the lock for a change, after all earlier releases. slot: one that must exist."""
        with self.lock, sigint_deferred():
            assert not self._changing, "changes are not nested"
            self._changing = True
            try:
                while self._released:
                    self._leave(*self._released.popleft())
                assert slot is None or slot in self._slots, RELEASED
                yield
            finally:
                try:
                    self._allocator.settle()
                finally:
                    self._changing = False

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
        """`onward.decoding.CacheManager.acquire`. What only the store has of `ids` is left to `restoration`."""
        self._check_length(length)
        with self._change(pin):
            limit, blocks = min(len(ids) - 1, length) if reuse else 0, -(-length // self.block)
            root, pinned = root_of(adapter, salt), None
            match = self._index.match(ids, limit, root)
            prefix = self._allocator.prefix(match)
            fits = self._allocator.fits(prefix, blocks)
            if not fits and pin is not None:  # else it keeps its blocks until all copies are made
                pinned = PrefixMatch(self._index.nodes(pin), pin.length)
                self._allocator.leave(pin)
                fits = self._allocator.fits(prefix, blocks)
            if not fits and match.positions % self.block:
                match = self._index.match(ids, match.positions // self.block * self.block, root)
                prefix = self._allocator.prefix(match)
                fits = self._allocator.fits(prefix, blocks)
            try:
                slot = self._new_slot(prefix, length, adapter, root) if fits else None
            except BaseException:
                if pin is not None and pinned is not None:
                    ids = [token for node in pinned.nodes for token in node.tokens][: pinned.positions]
                    self._allocator.pin(pin, self._index.match(ids, len(ids), pin.root))
                raise
            if slot is None:
                if pin is not None and pinned is not None:
                    self._allocator.pin(pin, pinned)
                return None
            slot.branch = self._index.branch(ids, limit, root) if self._states else 0
            if self.disk is not None:
                slot.stored = self.disk.find(slot, ids, limit, match.positions)
            self._set_note_at(slot, slot.noted)
            if pin is not None:
                self._allocator.leave(pin)
                self._forget(pin)
            if reuse:
                self._lookups += len(ids)
                self._hits += match.positions
            return slot, match.positions

    def set_store(self, current: CurrentStore | None) -> None:
        """Read from and write to a store of prefixes of the weights that `set_weights_version` has named, if any."""
        if self.disk is None or self.disk.current is not current:
            with self.lock:
                if self.disk is not None:
                    self.disk.end()
                arguments = self._index, self._kinds, self._tables.views, self.disk_counts
                self.disk = None if current is None else DiskPrefixes(current, *arguments)

    def fork(self, slot: Slot, positions: int, length: int) -> Slot | None:
        """Allocate a slot of `length` positions that starts with the first `positions` of another.

        Full blocks are shared: neither slot writes them from now on. A partial block and recurrent states are copied.
        Returns None if there is no room now, or `slot` no longer has the window or the states at that position.
        """
        assert 0 <= positions <= min(slot.length, length), (positions, slot.length, length)
        self._check_length(length)
        with self._change(slot):
            prefix = self._allocator.prefix_of(slot, positions, self._index.nodes(slot))
            if prefix is None or not self._allocator.fits(prefix, -(-length // self.block)):
                return None
            fork = self._new_slot(prefix, length, slot.adapter, slot.root)
            fork.findable, fork.noted = slot.findable, min(slot.noted, fork.noted)
            self._set_note_at(fork, fork.noted)
            return fork

    def _new_slot(self, prefix: Prefix, length: int, adapter: AdapterRef | None, root: str) -> Slot:
        """Allocate a slot that fits."""
        slot = Slot(length, adapter, root, noted=prefix.positions // self.block)
        copies = self._allocator.begin(slot, prefix, -(-length // self.block))
        self._slots[slot] = None
        try:
            for copy in copies:
                copy()
        except BaseException:
            self._allocator.leave(slot)
            self._forget(slot)
            raise
        return slot

    def _set_note_at(self, slot: Slot, blocks: int) -> None:
        slot.note_at = (blocks + 1) * self.block if slot.findable or self._windows else NEVER

    def reserve(self, slot: Slot, length: int) -> bool:
        """Extend the slot to at least `length` positions. Returns False, with nothing changed, if there is no room."""
        self._check_length(length)
        with self._change(slot):
            if not self._allocator.extend(slot, -(-length // self.block)):
                return False
            slot.length = max(slot.length, length)
            return True

    def _insert(self, slot: Slot, ids: Sequence[int]) -> None:
        """Add the slot's full blocks to the prefix index, and a copy of its states after the last one."""
        if slot.findable:
            self._index.insert(slot, ids)
            full = len(ids) // self.block
            for kind in self._states if full else ():
                kind.snapshot(slot, full * self.block, lambda: self._index.node_at(slot, ids, full), self._allocator)

    def release(self, slot: Slot, ids: Sequence[int] = (), pin: bool = False) -> None:
        """Release a slot whose first positions hold these ids; they stay cached, including a partial block.

        The garbage collector may call this at any moment, in any thread: while a method runs or another thread holds
        the lock, the slot is released by the next method.

        pin: whether the slot remains as a pinned prefix, which keeps these ids cached until another release.
        """
        assert slot.stamp or slot in self._slots, RELEASED
        assert len(ids) <= slot.length or not slot.stamp, (len(ids), slot.length)
        self._released.append((slot, ids, pin))
        if self.lock.acquire(blocking=False):
            try:
                self._release_all()
            finally:
                self.lock.release()

    def pinned(self, pin: Slot) -> int:
        """How many ids a pinned prefix keeps; 0 after `clear` or another weights version."""
        with self._change():
            return pin.length

    def _release_all(self) -> None:
        if self._released and not self._changing:
            with self._change():  # which begins with these releases
                pass

    def _leave(self, slot: Slot, ids: Sequence[int], pin: bool) -> None:
        assert slot in self._slots, RELEASED
        ids = ids[: slot.length]  # of a slot that a fork has emptied, none
        nodes: list[PrefixNode] = []
        try:
            self._insert(slot, ids)
        finally:
            if slot.findable:
                nodes = self._index.leave(slot, ids, pin)
            self._allocator.leave(slot, len(ids), nodes)
            if pin:
                self._allocator.pin(slot, PrefixMatch(nodes[: -(-len(ids) // self.block)], len(ids)))
            else:
                self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        del self._slots[slot]
        slot.void()

    def set_weights_version(self, key: object) -> None:
        """Name the weights that compute new entries. A different key empties the prefix index; existing slots keep
        their blocks, which never enter it again, and pins nothing."""
        if key == self.weights_version:
            return
        with self._change():
            for slot in self._slots:
                slot.findable, slot.note_at, slot.stored = False, NEVER, None
            self.set_store(None)
            self._clear()
            self.weights_version = key

    def clear(self) -> None:
        """Empty the prefix index and return the memory of all free blocks. Slots keep their blocks, pins nothing."""
        with self._change():
            self._clear()

    def _clear(self) -> None:
        self._index.clear()
        for slot in self._slots:
            slot.noted = 0
            if slot.is_pin:
                self._allocator.leave(slot)
            else:
                self._set_note_at(slot, 0)
        for kind in self._kinds:
            kind.cool(0)

    def renew(self) -> None:
        """In a forked child: a new lock; slots of threads that the child lacks are released."""
        self.lock = threading.RLock()
        self.set_store(None)  # the child has no thread that writes
        if self._changing:
            slots = [slot for slot in self._slots if slot.thread == threading.get_ident()]
            self._reset()
            for slot in slots:
                slot.void()
                self._slots[slot] = None  # its owner releases it
        with self._change():
            for slot in list(self._slots):
                if slot.thread != threading.get_ident():
                    self._leave(slot, (), False)

    def _check_length(self, length: int) -> None:
        assert length >= 0, length
        if not self.can_hold(length):
            raise ContextOverflowError(
                f"cannot reserve {length} positions: a sequence can have at most {self.max_len}, and all "
                f"{self._allocator.total} blocks together hold {self._allocator.longest * self.block}. Ask for fewer, "
                "or provide a larger cache"
            )
