"""The paged cache manager: slots that share the blocks of common prefixes.

A `Slot` is a row: a list of blocks for a number of positions. `acquire` finds final blocks through a trie of tokens
(`onward.cache.prefix_index`) while they are held and, within a budget, afterwards. Blocks that a slot may still write
are its own.
"""

import operator
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from onward.cache.block_table import BlockTableTensors
from onward.cache.paged import KVPool
from onward.cache.pools import Pools, PrefixIndex
from onward.cache.prefix_index import PrefixMatch
from onward.cache.slot import NEVER, AdapterRef, CacheView, Slot, index_of
from onward.errors import ContextOverflowError, RequestError
from onward.native import library
from onward.ops.heads import BLOCK
from onward.ops.recurrent_state import STATE_BLOCK
from onward.util.checks import check_whole
from onward.util.process import renew_in_forks
from onward.util.text import described

_WARM_BLOCKS = 8


class PagedCacheManager:
    """A `onward.decoding.CacheManager` over a pool of blocks. Every method holds `lock`, and so does the caller of a
    forward over a `view`.

    `acquire`, `fork` and `reserve` raise `ContextOverflowError` for a length that never fits.

    After an interrupt or failed copy, the next call rebuilds the accounts from the slots and empties the prefix index.
    A forked child releases the slots of the parent's other threads.

    Args:
        max_len: the most positions of a slot.
        cached_blocks: the most cached blocks, which no slot holds.
        warm_blocks: how many free blocks keep their memory (`BlockAccounts`).
        block: positions of a block.
        nbytes: the most memory in use; by default all of the pool.

    shares_rows: True with native kernels: they read blocks shared by rows of one slot once, torch copies them for each.
        Recurrent layers process tokens one by one, so their rows share no slot.
    hits, lookups: positions that `acquire` reused, and was asked for, in all.
    """

    whole = False

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
        self.max_len = max_len
        self.block = block
        self.hits = self.lookups = 0
        self._memory = memory
        self._pools = pools = Pools(memory, block, cached_blocks, warm_blocks, nbytes)
        self._budget, self._pool, self._windows, self._states = pools.budget, pools.blocks, pools.windows, pools.states
        self._index = PrefixIndex(pools)
        self._tables = BlockTableTensors(memory, -(-max_len // block))
        self._slots: dict[Slot, None] = {}
        self._key: object = None
        self._changing = False
        self._left: deque[tuple[Slot, Sequence[int]]] = deque()
        renew_in_forks(self)

    def __repr__(self) -> str:
        counts = f"{self.total} blocks of {self.block} positions", f"{self.free} free", f"{self.cached} cached"
        return described(self, *counts, f"{self.held} held")

    @property
    def total(self) -> int:
        """The number of blocks: free + cached + held."""
        return self._budget.total

    @property
    def free(self) -> int:
        """Blocks that are neither held nor cached."""
        with self.lock:
            return self.available - self.cached

    @property
    def cached(self) -> int:
        """Blocks of the prefix index that no slot holds; they are evicted when room is needed."""
        with self.lock:
            self._mend()
            return self._budget.cached

    @property
    def held(self) -> int:
        """Blocks that slots hold or reserve."""
        return self.total - self.available

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free and cached ones."""
        with self.lock:
            self._mend()
            return self._budget.available

    @property
    def unit_nbytes(self) -> int:
        """The bytes of a block."""
        return self._budget.prices.unit

    def blocks_for(self, length: int) -> int:
        return self._pools.price(length)

    def shared_blocks(self, positions: int) -> int:
        return positions // self.block * self._budget.prices.block

    def blocks_of(self, slots: Sequence[Slot]) -> int:
        return self._pools.price_of(slots)

    def can_hold(self, length: int) -> bool:
        """Whether `length` positions could be reserved without any other slot."""
        return length <= self.max_len and self._pools.can_hold(length)

    def acquire(
        self, ids: Sequence[int], length: int, *, reuse: bool = True, adapter: AdapterRef | None = None
    ) -> tuple[Slot, int] | None:
        """Allocate a slot of `length` positions for a sequence that begins with `ids`.

        Args:
            adapter: the adapter that computes its keys and values; only blocks of an equal one are reused.
            reuse: whether to look for a cached prefix of `ids`.

        Returns:
            The slot, and how many of its first positions already hold these ids: at most len(ids) - 1, because the
            model predicts from the last id. None, with nothing changed, if there is no room now.
        """
        self._check_length(length)
        with self.lock:
            self._mend()
            pool, count = self._pool, self._pools.count(length)
            limit = min(len(ids) - 1, length)
            match, kept = self._index.match(ids, limit if reuse else 0, adapter)
            if match.partial is not None and not self._pools.fit_after(match, count):
                match, kept = self._index.reusable(PrefixMatch(match.path, None, 0))
            if not self._pools.fit_after(match, count):
                return None
            self._changing = True
            path, partial, common = match
            reused = len(path) * self.block + common
            source = None if partial is None else partial.window
            pool.hold(node.block for node in path)
            slot = Slot([node.block for node in path], length, sealed=len(path), adapter=adapter)
            self._windows.reserve(slot, self._windows.most(count))
            self._windows.begin(
                slot, reused, {at: node.window for at, node in enumerate(path) if node.window is not None}
            )
            if partial is not None:
                pool.touch(partial)
            slot.state = self._states.take() if kept is None else self._states.fork_kept(kept)
            if source is not None:
                self._windows.copy_part(slot, reused, source)
            own = [pool.take() for _ in range(count - len(path))]
            # The block to copy from may be the only one that could be taken. Then its content is already in place.
            if partial is not None and own[0] != partial.block:
                self._memory.copy(partial.block, own[0], common)
            slot.place([*slot.blocks, *own])
            slot.branch = self._index.branch(ids, limit, adapter) if reuse else 0
            slot.noted = len(path)
            self._set_note_at(slot)
            self._slots[slot] = None
            if reuse:
                self.lookups += len(ids)
                self.hits += reused
            self._changing = False
            return slot, reused

    def fork(self, slot: Slot, positions: int, length: int) -> Slot | None:
        """Allocate a slot of `length` positions that starts with the first `positions` of another.

        Full blocks are shared: neither slot writes them from now on. A partial block and recurrent states are copied.
        Returns None if there is no room now, or `slot` no longer has the window or the states at that position.
        """
        assert 0 <= positions <= min(slot.length, length), (positions, slot.length, length)
        self._check_length(length)
        with self.lock:
            self._mend(slot)
            pool = self._pool
            full, part = divmod(positions, self.block)
            count = self._pools.count(length)
            if not self._pools.fit(count - full, self._windows.most(count), 1) or not self.holds(slot, positions):
                return None
            self._changing = True
            shared, nodes = slot.blocks[:full], self._index.nodes(slot)
            pool.hold(shared)
            fork = Slot(shared, length, sealed=full, adapter=slot.adapter)
            self._windows.reserve(fork, self._windows.most(count))
            self._windows.fork(slot, fork, positions, nodes)
            own = [pool.take() for _ in range(count - full)]
            if part:
                self._memory.copy(slot.blocks[full], own[0], part)
            slot.sealed = max(slot.sealed, full)
            fork.place([*shared, *own])
            fork.state = self._states.fork(slot.state)
            fork.findable = slot.findable
            fork.noted = min(slot.noted, full)
            self._set_note_at(fork)
            self._slots[fork] = None
            self._changing = False
            return fork

    def reserve(self, slot: Slot, length: int) -> bool:
        """Extend the slot to at least `length` positions. Returns False, with nothing changed, if there is no room."""
        self._check_length(length)
        with self.lock:
            self._mend(slot)
            count = self._pools.count(length) - len(slot.blocks)
            windows = max(slot.max_windows, self._windows.most(self._pools.count(length)))
            if not self._pools.fit(max(count, 0), windows - slot.max_windows, 0):
                return False
            self._changing = True
            if count > 0:
                slot.place([*slot.blocks, *(self._pool.take() for _ in range(count))])
            slot.length = max(slot.length, length)
            self._windows.reserve(slot, windows)
            self._changing = False
            return True

    def holds(self, slot: Slot, positions: int) -> bool:
        """Whether the slot can continue from an earlier position: not if the window blocks before it or the recurrent
        states there are gone."""
        if not self._states.holds(slot.state, positions):
            return False
        with self.lock:
            return self._windows.holds(slot, positions, self._index.nodes(slot))

    def truncate(self, slot: Slot, positions: int) -> None:
        """Keep only the first `positions` positions. A shared block that is cut is replaced by a copy of its part.

        Raises:
            ContextOverflowError: another slot holds that block, and there is no room for the copy now. Nothing has
                changed.
        """
        assert 0 <= positions <= slot.length, (positions, slot.length)
        with self.lock:
            self._mend(slot)
            pool = self._pool
            full, part = divmod(positions, self.block)
            kept, dropped = slot.blocks[: full + bool(part)], slot.blocks[full + bool(part) :]
            cut = kept[-1] if part else None
            if cut is not None and pool.holders[cut] > 1:
                freed = sum(pool.holders[block] == 1 for block in dropped)
                if not self._pools.fit(1 - freed, 0, 0):
                    raise ContextOverflowError(
                        f"truncating to {positions} positions needs a block, because the one there is shared; all "
                        f"{self.total} blocks are in use. Try again when another request has ended"
                    )
            self._changing = True
            nodes = self._index.nodes(slot)
            slot.noted, slot.sealed = min(slot.noted, full), min(slot.sealed, len(kept))
            self._set_note_at(slot)
            slot.length = positions  # first: `_forget` drops blocks past it too
            slot.place(kept)
            self._windows.cut(slot, positions, nodes)
            pool.drop(dropped)
            pool.settle(dropped)
            self._windows.own_last(slot, positions)
            if cut is not None:
                self._own_last(slot, cut, part)
            slot.sealed = min(slot.sealed, full)
            self._changing = False

    def _own_last(self, slot: Slot, cut: int, part: int) -> None:
        """Make the last block, `cut`, private to the slot; its first `part` positions are kept."""
        pool = self._pool
        node = pool.nodes[cut]
        if pool.holders[cut] == 1 and node is None:
            return
        if not self._pools.fit(1, 0, 0):  # then no other slot holds it
            assert node is not None
            pool.unpublish(node)
            return
        own = pool.take()
        self._memory.copy(cut, own, part)
        slot.place([*slot.blocks[:-1], own])
        pool.drop([cut])
        pool.settle([cut])

    def advance(self, slot: Slot, computed: int, ids: Callable[[int, int], Sequence[int]]) -> None:
        """`note` that the first `computed` positions are final. ids: (first, last) -> their ids."""
        if computed >= slot.note_at:
            self.note(slot, ids(0, computed))

    def note(self, slot: Slot, ids: Sequence[int]) -> None:
        """Mark the first len(ids) positions as final, which adds full blocks to the prefix index.

        Call it after every step: it returns immediately unless a block has become full. If the index already has a
        block with the same tokens, the slot keeps its own outside the index.
        """
        if len(ids) < slot.note_at:  # another thread may change note_at; then this is done a block later
            return
        with self.lock:
            self._mend(slot)
            self._changing = True
            if slot.findable:
                self._index.note(slot, ids)
            if self._windows.memory is not None:
                self._windows.pass_on(slot, len(ids))
                self._budget.trim()
                slot.note_at = (len(ids) // self.block + 1) * self.block  # even if the slot is not findable
            self._changing = False

    def release_later(self, slot: Slot, ids: Sequence[int] = ()) -> None:
        """`release` with the next call: the garbage collector may call this in the middle of any other method."""
        self._left.append((slot, ids))

    def release(self, slot: Slot, ids: Sequence[int] = ()) -> None:
        """Release a slot whose first positions hold these ids; they stay cached, including a partial block."""
        with self.lock:
            self._mend(slot)
            pool = self._pool
            self._changing = True
            if slot.findable:
                self._index.note(slot, ids)
            del self._slots[slot]
            pool.drop(slot.blocks)
            path = self._index.leave(slot, ids) if slot.findable else []
            self._index.leave_states(slot, len(ids), path)
            self._windows.release(slot, path)
            pool.settle(slot.blocks, path)
            slot.void()
            self._changing = False

    def view(self, slots: Sequence[Slot]) -> Any:
        """The cache of these rows, in order, for a forward; valid until the next `view`."""
        with self.lock:
            stamps = [slot.stamp for slot in slots]
            adapters = [index_of(slot.adapter) for slot in slots]
            cache = self._tables.current(stamps, any(adapters))
            if cache is None:
                for slot in slots:
                    self._mend(slot)
                states = [slot.state for slot in slots if slot.state is not None]
                cache = self._tables.view(slots, stamps, states, adapters)
            return cache

    def ensure_writable(self, slots: Sequence[Slot], firsts: Sequence[int], tokens: int) -> None:
        """Allocate window blocks for writing `tokens` positions of each slot from its first position on. Raises
        `ContextOverflowError` if these exceed `max_chunk` and there is no room."""
        if self._windows.memory is None:
            return
        for slot, first in zip(slots, firsts, strict=True):
            missing = self._windows.missing(slot, first, first + tokens)
            if missing:
                self._mend(slot)
                if not self._reserve_windows(slot, len(slot.windows) + len(missing)):
                    raise ContextOverflowError(
                        f"{tokens} positions at once need more sliding-window blocks than are left: process fewer"
                    )
                self._changing = True
                self._windows.provide(slot, missing)
                self._changing = False

    def _reserve_windows(self, slot: Slot, count: int) -> bool:
        """Reserve up to `count` window blocks for a slot. Returns False if there is no room now."""
        more = count - slot.max_windows
        if more > 0:
            if not self._pools.fit(0, more, 0):
                return False
            self._windows.reserve(slot, count)
        return True

    def view_of(self, slots: Sequence[Slot], tokens: int) -> CacheView:
        return CacheView(self.view(slots), range(len(slots)))

    def check_written(self, view: CacheView, cache: Any) -> None:
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

    def max_step_tokens(self, slots: Sequence[Slot], computed: Sequence[int]) -> int:
        room = self.max_len - max(computed)
        if self._windows.memory is not None:
            room = min(room, self.block)
        return room if self._states.memory is None else min(room, STATE_BLOCK)

    def max_chunk(self, slot: Slot | None, first: int, count: int) -> int:
        """How many of `count` prompt ids, from position `first` on, to process at once.

        For sliding layers, as many as there are blocks for, which are reserved. For cached recurrent states, up to the
        last end of a block, since states are cached only there, or to where the prompt diverges from an earlier one,
        since a third may diverge there too (arXiv 2411.19379). Without a slot (a search with running beams) count is 1.
        """
        while slot is not None and count > self.block:
            with self.lock:
                self._mend(slot)
                missing = self._windows.missing(slot, first, first + count)
                if self._reserve_windows(slot, len(slot.windows) + len(missing)):
                    break
            count = max(self.block, count // 2)
        end = (first + count) // self.block * self.block
        if slot is None or not self._states.max_kept or end <= first:
            return count
        return (slot.branch if first < slot.branch < end else end) - first

    def read(self, slot: Slot, positions: int) -> Any:
        """A copy of a slot's first positions as a dense cache of one row."""
        with self.lock:
            return self._memory.read(slot, positions)

    def write(self, slot: Slot, cache: Any, positions: int) -> None:
        """Copy the first positions of a dense cache of one row to a slot without shared blocks."""
        with self.lock:
            seen = self._windows.seen(positions)
            self.ensure_writable([slot], [seen.start * self.block], positions - seen.start * self.block)
            self._memory.write(slot, cache, positions)

    def set_weights_version(self, key: object) -> None:
        """Name the weights that compute new entries. A different key empties the prefix index; existing slots keep
        their blocks, which never enter it again."""
        with self.lock:
            if key == self._key:
                return
            for slot in self._slots:
                slot.findable, slot.note_at = False, NEVER
            self._forget()
            self._key = key

    def clear(self) -> None:
        """Empty the prefix index and return the memory of all free blocks. Slots keep their blocks."""
        with self.lock:
            self._forget()

    def renew(self) -> None:
        """In a forked child: a new lock; slots of threads that the child lacks are released."""
        self.lock = threading.RLock()
        left, self._left = self._left, deque()
        for slot in list(self._slots):
            if slot.thread != threading.get_ident():
                self.release(slot)
        self._left.extend(item for item in left if item[0] in self._slots)

    def _check_length(self, length: int) -> None:
        assert length >= 0, length
        if not self.can_hold(length):
            raise ContextOverflowError(
                f"cannot reserve {length} positions: a sequence can have at most {self.max_len}, and all {self.total} "
                f"blocks together hold {self._pools.longest}. Ask for fewer, or provide a larger cache"
            )

    def _mend(self, slot: Slot | None = None) -> None:
        """Rebuild the accounts if the last change was interrupted, and check that `slot` exists."""
        if self._changing:
            self._forget()
        while self._left:
            self.release(*self._left.popleft())
        assert slot is None or slot in self._slots, "the slot was released, or the process was forked by another thread"

    def _forget(self) -> None:
        self._changing = True
        for slot in self._slots:
            if len(slot.blocks) > self._pools.count(slot.length):
                slot.place(slot.blocks[: self._pools.count(slot.length)])
        self._pool.forget(slot.blocks for slot in self._slots)
        self._windows.forget(list(self._slots))
        self._states.forget([slot.state for slot in self._slots])
        for slot in self._slots:
            slot.noted = 0
            self._set_note_at(slot)
        self._changing = False

    def _set_note_at(self, slot: Slot) -> None:
        has_work = slot.findable or self._windows.memory is not None
        slot.note_at = (slot.noted + 1) * self.block if has_work else NEVER
