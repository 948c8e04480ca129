"""Which recurrent states are free, in use, or cached by nodes of the prefix index."""

import weakref
from collections import OrderedDict
from collections.abc import Sequence

from onward.cache.budget import CacheBudget
from onward.cache.kinds import RecurrentStatePool
from onward.cache.prefix_index import NO_MATCH, PrefixMatch, PrefixNode


class StatePool:
    """The state slots of sequences, and of nodes that cache the states after their tokens.

    Without recurrent layers there is no memory, and every sequence's state slot is None.

    max_kept: the most nodes that cache states, in as much memory as `cached_blocks` take; the least recently used are
    evicted first.
    """

    def __init__(self, memory: RecurrentStatePool | None, cached_blocks: int, budget: CacheBudget) -> None:
        self.memory = memory
        self._budget = budget
        budget.states = weakref.proxy(self)
        self.free = list(range(0 if memory is None else memory.count))[::-1]
        affordable = 0 if memory is None else cached_blocks * memory.block_nbytes // memory.nbytes
        self.max_kept = 0 if memory is None else min(affordable, memory.count // 2)
        self.kept: OrderedDict[PrefixNode, None] = OrderedDict()

    @property
    def used(self) -> int:
        return 0 if self.memory is None else self.memory.count - len(self.free)

    @property
    def is_full(self) -> bool:
        return self.memory is not None and not self.free and not self.kept

    def take(self) -> int | None:
        """Allocate an empty slot."""
        if self.memory is None:
            return None
        self._budget.make_room(self._budget.prices.state)
        if not self.free:
            self.drop(next(iter(self.kept)))
        slot = self.free.pop()
        self.memory.clear(slot)
        return slot

    def fork(self, source: int | None) -> int | None:
        """Allocate a copy of a sequence's slot."""
        slot = self.take()
        if self.memory is not None and source is not None and slot is not None:
            self.memory.copy(source, slot)
        return slot

    def give_back(self, slot: int | None) -> None:
        if slot is not None:
            self.free.append(slot)

    def holds(self, slot: int | None, positions: int) -> bool:
        """Whether a slot has the states after this many positions."""
        return self.memory is None or slot is None or self.memory.holds(slot, positions)

    def keep(self, node: PrefixNode, slot: int, end: int) -> None:
        """Cache the states in `slot` at a node, replacing its own. end: the number of positions they have seen."""
        self.drop(node)
        node.state, node.state_end = slot, end
        self.kept[node] = None
        while len(self.kept) > self.max_kept:
            self.drop(next(iter(self.kept)))

    def snapshot(self, node: PrefixNode, source: int, end: int) -> None:
        """Cache a copy of a sequence's states at a node, if there is room for one."""
        if self.max_kept and self._can_copy and self.memory is not None:
            slot = self.fork(source)
            assert slot is not None
            if self._is_found(node):
                self.keep(node, slot, end)
            else:  # evicted to make room for the copy
                self.free.append(slot)

    def fork_kept(self, node: PrefixNode) -> int:
        """Allocate a copy of a node's states, or take the node's own slot if there is no room."""
        source = node.state
        assert source is not None
        del self.kept[node]  # temporarily, so that making room does not take it
        node.state = None
        if not self._can_copy:
            return source
        copy = self.fork(source)
        assert copy is not None
        if self._is_found(node):
            node.state = source
            self.kept[node] = None
        else:
            self.free.append(source)
        return copy

    def _is_found(self, node: PrefixNode) -> bool:
        return self._budget.blocks.nodes[node.block] is node

    @property
    def _can_copy(self) -> bool:
        return not self.is_full and self._budget.available >= self._budget.prices.state

    def drop(self, node: PrefixNode) -> None:
        """Drop a node's states."""
        if node.state is not None:
            del self.kept[node]
            self.free.append(node.state)
            node.state = None

    def reusable(self, match: PrefixMatch, size: int) -> tuple[PrefixMatch, PrefixNode | None]:
        """The longest part of a match with cached states, and their node. size: positions of a block."""
        if self.memory is None:
            return match, None
        path, partial, common = match
        if partial is not None and self._keeps(partial, len(path) * size + common):
            return match, partial
        for depth in range(len(path), 0, -1):
            if self._keeps(path[depth - 1], depth * size):
                return PrefixMatch(path[:depth], None, 0), path[depth - 1]
        return NO_MATCH, None

    def _keeps(self, node: PrefixNode, positions: int) -> bool:
        return node.state is not None and positions <= node.state_end and self.holds(node.state, positions)

    def forget(self, used: Sequence[int | None]) -> None:
        """Drop all cached states; all slots but these are free."""
        self.kept.clear()
        count = 0 if self.memory is None else self.memory.count
        self.free = [slot for slot in range(count - 1, -1, -1) if slot not in used]
