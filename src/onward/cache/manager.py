"""Who holds which block: slots for texts whose keys and values lie in blocks, shared where texts are the same.

A `Slot` is a row's place: a list of blocks for a number of positions. Blocks whose text is final can be found by
`acquire` through a trie of tokens (`onward.cache.prefix_index`), while somebody holds them and, within a budget, after.
What a slot may still write is its alone.
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
from onward.cache.prefix_index import PrefixMatch, PrefixNode
from onward.cache.slot import NEVER, AdapterRef, CacheView, Slot, index_of
from onward.errors import ContextOverflowError, RequestError
from onward.native import library
from onward.ops.kv_write import BLOCK
from onward.ops.recurrent_state import STATE_BLOCK
from onward.util.checks import check_whole
from onward.util.process import renew_in_forks
from onward.util.text import described

_WARM_BLOCKS = 8


class PagedCacheManager:
    """Slots over a memory of blocks. Every method holds `lock`, and so does whoever runs a forward over a `view`.

    A call that an interrupt or a failing copy cuts short leaves the accounts half changed. The next call makes them
    anew from what the slots hold, and forgets what could be found. In a forked child the slots of the parent's other
    threads are let go.

    Room is counted in blocks, as `onward.cache.pools` says.

    Args:
        max_len: the most positions of a slot.
        cached_blocks: the most blocks kept that nobody holds; 0: none.
        warm_blocks: how many free blocks keep their memory (`BlockPool`).
        block: positions of a block.
        nbytes: the most memory that all together take; by default as much as there is.

    whole: False, for any rows make a cache of their own (`onward.decoding.cache_manager.CacheManager`).
    shares_rows: whether there are kernels: they read once what rows of one slot share, torch copies it for each.
        Recurrent layers take the tokens of a text one after the other, so there rows share no slot.
    hits, lookups: positions that `acquire` found, and that it was asked for, in all.
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
        self._texts = PrefixIndex(pools)
        self._tables = BlockTableTensors(memory, -(-max_len // block))
        self._slots: dict[Slot, None] = {}
        self._key: object = None
        self._changing = False
        self._left: deque[tuple[Slot, Sequence[int]]] = deque()
        renew_in_forks(self)

    def __repr__(self) -> str:
        counts = f"{self.total} blocks of {self.block} positions", f"{self.free} free", f"{self.cached} cached"
        return described(self, *counts, f"{self.held} held")

    # Counts

    @property
    def total(self) -> int:
        """How many blocks there are: free + cached + held."""
        return self._budget.total

    @property
    def free(self) -> int:
        """Blocks that nobody holds and whose text cannot be found."""
        with self.lock:
            self._mend()
            return self._budget.available - self._budget.cached

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and whose text can be found; they give way to who needs room."""
        with self.lock:
            self._mend()
            return self._budget.cached

    @property
    def held(self) -> int:
        """Blocks that some slot holds, or several, or that are reserved for it."""
        with self.lock:
            self._mend()
            return self.total - self._budget.available

    @property
    def available(self) -> int:
        """Blocks that can be had now: free and cached ones."""
        with self.lock:
            self._mend()
            return self._budget.available

    @property
    def unit_nbytes(self) -> int:
        """The bytes of a block."""
        return self._budget.prices.unit

    def blocks_for(self, length: int) -> int:
        """How many blocks a slot of `length` positions takes."""
        return self._pools.price(length)

    def shared_blocks(self, positions: int) -> int:
        """How many blocks a fork at so many positions shares with the slot that it is a fork of."""
        return positions // self.block * self._budget.prices.block

    def blocks_of(self, slots: Sequence[Slot]) -> int:
        """How many blocks these slots hold together."""
        return self._pools.price_of(slots)

    def can_hold(self, length: int) -> bool:
        """Whether `length` positions could ever be reserved: with no other slot there."""
        return length <= self.max_len and self._pools.can_hold(length)

    # Slots

    def acquire(
        self, ids: Sequence[int], length: int, *, reuse: bool = True, adapter: AdapterRef | None = None
    ) -> tuple[Slot, int] | None:
        """A slot of `length` positions for a text that begins with `ids`.

        Args:
            adapter: that its keys and values are computed with; only what was computed with an equal one is found.
            reuse: whether to look for blocks that hold a prefix of `ids`, with the states after it where there are
                recurrent layers.

        Returns:
            The slot, and how many of its first positions hold these ids' keys and values already: at most len(ids) - 1,
            for the model predicts from the last id. None where there is no room now; then nothing has changed.

        Raises:
            ContextOverflowError: there will never be room.
        """
        self._check_length(length)
        with self.lock:
            self._mend()
            pool, count = self._pool, self._pools.count(length)
            limit = min(len(ids) - 1, length)
            match, kept = self._texts.match(ids, limit if reuse else 0, adapter)
            if match.partial is not None and not self._pools.fit_after(match, count):
                match, kept = self._texts.reusable(PrefixMatch(match.path, None, 0))
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
            # The block to copy from may be the only one there was to take. Then its text lies where it is wanted.
            if partial is not None and own[0] != partial.block:
                self._memory.copy(partial.block, own[0], common)
            slot.place([*slot.blocks, *own])
            slot.branch = self._texts.branch(ids, limit, adapter) if reuse else 0
            self._add(slot, noted=len(path))
            if reuse:
                self.lookups += len(ids)
                self.hits += reused
            self._changing = False
            return slot, reused

    def fork(self, slot: Slot, positions: int, length: int) -> Slot | None:
        """Another slot whose first `positions` positions hold what those of `slot` do, with `length` reserved.

        Full blocks are shared: neither slot writes them from now on. The part of a block and recurrent states are
        copied. None: no room now, or `slot` has the window or the states of so many positions no more.

        Raises:
            ContextOverflowError: there will never be room.
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
            shared, nodes = slot.blocks[:full], self._texts.nodes(slot)
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
            self._add(fork, noted=min(slot.noted, full))
            self._changing = False
            return fork

    def reserve(self, slot: Slot, length: int) -> bool:
        """Let the slot have `length` positions or more. False: no room now, and nothing has changed.

        Raises:
            ContextOverflowError: there will never be room.
        """
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
        """Whether the slot could go on from so many positions, which it has held: it could not where the blocks of the
        window before them, or the recurrent states of so many, are not there any more."""
        if not self._states.holds(slot.state, positions):
            return False
        with self.lock:
            return self._windows.holds(slot, positions, self._texts.nodes(slot))

    def truncate(self, slot: Slot, positions: int) -> None:
        """Keep the first `positions` positions; those after them will be reserved and written anew.

        A block that is cut and that others can see is replaced by a copy of its part.

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
                        f"cutting the text at {positions} positions takes a block, since another text shares the one "
                        f"there; all {self.total} blocks are in use. Try again when another text has ended"
                    )
            self._changing = True
            nodes = self._texts.nodes(slot)
            slot.noted, slot.sealed = min(slot.noted, full), min(slot.sealed, len(kept))
            slot.note_at = (slot.noted + 1) * self.block if self._is_noted(slot) else NEVER
            slot.length = positions  # first: what is past it is dropped by `_forget` too
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
        """See that nobody else can see the last block, `cut`, whose first `part` positions are kept."""
        pool = self._pool
        node = pool.nodes[cut]
        if pool.holders[cut] == 1 and node is None:
            return
        if not self._pools.fit(1, 0, 0):  # nobody else holds it, then
            assert node is not None
            pool.unpublish(node)
            return
        own = pool.take()
        self._memory.copy(cut, own, part)
        slot.place([*slot.blocks[:-1], own])
        pool.drop([cut])
        pool.settle([cut])

    def advance(self, slot: Slot, computed: int, ids: Callable[[int, int], Sequence[int]]) -> None:
        """`note` that the first `computed` positions are final. ids: (first, last) -> the ids that they hold."""
        if computed >= slot.note_at:
            self.note(slot, ids(0, computed))

    def note(self, slot: Slot, ids: Sequence[int]) -> None:
        """Say that the first len(ids) positions of the slot hold these ids for good: full blocks can be found now.

        To be called after every step with all ids: it returns at once unless a block has become full. Where another
        block with the same text can be found already, the slot keeps its own, which cannot.
        """
        if len(ids) < slot.note_at:  # another thread may change note_at; then this is done a block later
            return
        with self.lock:
            self._mend(slot)
            self._changing = True
            if slot.findable:
                self._texts.note(slot, ids)
            self._pass_on(slot, len(ids))
            self._changing = False

    def _pass_on(self, slot: Slot, positions: int) -> None:
        """Let go of what only positions before these needed."""
        if self._windows.memory is not None:
            self._windows.pass_on(slot, positions)
            self._budget.trim()
            slot.note_at = (positions // self.block + 1) * self.block  # also of a slot whose text is not to be found

    def release_later(self, slot: Slot, ids: Sequence[int] = ()) -> None:
        """`release` with the next call. It may come from the garbage collector, in the midst of any other method."""
        self._left.append((slot, ids))

    def release(self, slot: Slot, ids: Sequence[int] = ()) -> None:
        """Let the slot go. ids: what its first len(ids) positions hold; they can be found, the part of a block too."""
        with self.lock:
            self._mend(slot)
            pool = self._pool
            self._changing = True
            path: list[PrefixNode] = []
            if slot.findable:
                self._texts.note(slot, ids)
            del self._slots[slot]
            pool.drop(slot.blocks)
            if slot.findable:
                path = self._texts.leave(slot, ids)
            self._texts.leave_states(slot, len(ids), path)
            self._windows.release(slot, path)
            pool.settle(slot.blocks, path)
            slot.void()
            self._changing = False

    # What a forward gets, and what can be found

    def view(self, slots: Sequence[Slot]) -> Any:
        """The cache of these rows, in order, for a forward: valid until the next `view`."""
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
        """See that there are blocks for what a forward writes: `tokens` positions of each slot from its first on.

        Raises:
            ContextOverflowError: more positions than `piece` allowed, and no room for the blocks of their sliding
                layers.
        """
        if self._windows.memory is None:
            return
        for slot, first in zip(slots, firsts, strict=True):
            missing = self._windows.missing(slot, first, first + tokens)
            if missing:
                self._mend(slot)
                if not self._reserve_windows(slot, len(slot.windows) + len(missing)):
                    raise ContextOverflowError(
                        f"{tokens} positions at once take more blocks of sliding layers than are left: process fewer"
                    )
                self._changing = True
                self._windows.provide(slot, missing)
                self._changing = False

    def _reserve_windows(self, slot: Slot, count: int) -> bool:
        """Let a slot have so many window blocks. False: there is no room now."""
        more = count - slot.max_windows
        if more > 0:
            if not self._pools.fit(0, more, 0):
                return False
            self._windows.reserve(slot, count)
        return True

    def view_of(self, slots: Sequence[Slot], tokens: int) -> CacheView:
        """The same with the row of each slot."""
        return CacheView(self.view(slots), range(len(slots)))

    def check_written(self, view: CacheView, cache: Any) -> None:
        """A forward has written to the blocks in place.

        Raises:
            RequestError: it returned other tensors.
        """
        if cache is view.cache:
            return
        returned, own = tree_leaves(cache), tree_leaves(view.cache)
        if len(returned) != len(own) or any(map(operator.is_not, returned, own)):
            raise RequestError(
                "a forward over a cache in blocks must write to it in place and return it, and this one returned "
                "another: give its Model new_blocks=None, so that it gets the caches of new_cache"
            )

    def groups(self, slots: Sequence[Slot], tokens: int) -> list[list[int]]:
        """Any slots can go together."""
        return [list(range(len(slots)))]

    def max_step_tokens(self, slots: Sequence[Slot], computed: Sequence[int]) -> int:
        """How many tokens a row a forward over these slots may process, each from what it has computed on, if any of
        them may be taken back."""
        room = self.max_len - max(computed)
        if self._windows.memory is not None:
            room = min(room, self.block)
        return room if self._states.memory is None else min(room, STATE_BLOCK)

    def max_chunk(self, slot: Slot | None, first: int, count: int) -> int:
        """How many of `count` ids of a prompt, from position `first` on, to process at once: where layers slide as many
        as there are blocks for, which are reserved; where recurrent states are kept those up to the last end of a
        block, for only there they are, or to where the prompt leaves an earlier one, since a third may leave it there
        too (arXiv 2411.19379). Without a slot (a search, whose beams have them) count is 1."""
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
        """A copy of the first positions of a slot, as a dense cache of one row."""
        with self.lock:
            return self._memory.read(slot, positions)

    def write(self, slot: Slot, cache: Any, positions: int) -> None:
        """Take the first positions of a dense cache of one row into a slot that nobody shares."""
        with self.lock:
            seen = self._windows.seen(positions)
            self.ensure_writable([slot], [seen.start * self.block], positions - seen.start * self.block)
            self._memory.write(slot, cache, positions)

    def set_weights_version(self, key: object) -> None:
        """Say which weights fill the blocks from now on. Another key than before: nothing can be found.

        Slots of before keep their blocks, and what they hold will never be found.
        """
        with self.lock:
            if key == self._key:
                return
            for slot in self._slots:
                slot.findable, slot.note_at = False, NEVER
            self._forget()
            self._key = key

    def clear(self) -> None:
        """Forget all that can be found, and give back the memory of all free blocks. Slots keep their blocks."""
        with self.lock:
            self._forget()

    def renew(self) -> None:
        """In a forked child: a new lock; slots of threads that the child does not have are let go."""
        self.lock = threading.RLock()
        left, self._left = self._left, deque()
        for slot in list(self._slots):
            if slot.thread != threading.get_ident():
                self.release(slot)
        self._left.extend(item for item in left if item[0] in self._slots)

    # Within

    def _check_length(self, length: int) -> None:
        assert length >= 0, length
        if not self.can_hold(length):
            raise ContextOverflowError(
                f"{length} positions were to be reserved; a text can have {self.max_len} at most, and all "
                f"{self.total} blocks together hold {self._pools.longest}. Ask for fewer, or provide a larger cache"
            )

    def _mend(self, slot: Slot | None = None) -> None:
        """Make the accounts anew if the last change was cut short; see that `slot` is held."""
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
            slot.note_at = self.block if self._is_noted(slot) else NEVER
        self._changing = False

    def _is_noted(self, slot: Slot) -> bool:
        """Whether `note` has something to do for the slot at all."""
        return slot.findable or self._windows.memory is not None

    def _add(self, slot: Slot, noted: int) -> Slot:
        slot.noted = noted
        slot.note_at = (noted + 1) * self.block if self._is_noted(slot) else NEVER
        self._slots[slot] = None
        return slot
