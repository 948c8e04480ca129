"""Which recurrent states are free, in use, or kept by nodes of the prefix index."""

import weakref
from collections import OrderedDict
from collections.abc import Sequence

from onward.cache.budget import CacheBudget
from onward.cache.kinds import RecurrentStatePool
from onward.cache.prefix_index import NO_MATCH, PrefixMatch, PrefixNode


class StatePool:
    """Who has which slot of a memory of states: texts, and nodes of the trie that keep the states after their text.

    Where the model has no recurrent layers there is no memory: None stands for the slot of every text.

    most_kept: how many nodes keep states at most, in as much memory as `cached_blocks` take; the least recently used
    lets go of them first.
    """

    def __init__(self, memory: RecurrentStatePool | None, cached_blocks: int, budget: CacheBudget) -> None:
        self.memory = memory
        self._budget = budget
        budget.states = weakref.proxy(self)
        self.free = list(range(0 if memory is None else memory.count))[::-1]
        affordable = 0 if memory is None else cached_blocks * memory.block_nbytes // memory.nbytes
        self.most_kept = 0 if memory is None else min(affordable, memory.count // 2)
        self.kept: OrderedDict[PrefixNode, None] = OrderedDict()

    @property
    def used(self) -> int:
        """How many slots texts and nodes have."""
        return 0 if self.memory is None else self.memory.count - len(self.free)

    @property
    def is_full(self) -> bool:
        """Whether no text can be given states now."""
        return self.memory is not None and not self.free and not self.kept

    def take(self) -> int | None:
        """A slot that holds nothing."""
        if self.memory is None:
            return None
        self._budget.make_room(self._budget.prices.state)
        if not self.free:
            self.drop(next(iter(self.kept)))
        slot = self.free.pop()
        self.memory.clear(slot)
        return slot

    def fork(self, source: int | None) -> int | None:
        """A slot that holds what `source` does, that of a text."""
        slot = self.take()
        if self.memory is not None and source is not None and slot is not None:
            self.memory.copy(source, slot)
        return slot

    def give_back(self, slot: int | None) -> None:
        if slot is not None:
            self.free.append(slot)

    def holds(self, slot: int | None, positions: int) -> bool:
        """Whether the states after so many positions of a text are there."""
        return self.memory is None or slot is None or self.memory.holds(slot, positions)

    # What nodes keep

    def keep(self, node: PrefixNode, slot: int, end: int) -> None:
        """Let a node keep the states in `slot`, which have seen `end` positions, in place of those that it has."""
        self.drop(node)
        node.state, node.state_end = slot, end
        self.kept[node] = None
        while len(self.kept) > self.most_kept:
            self.drop(next(iter(self.kept)))

    def snapshot(self, node: PrefixNode, source: int, end: int) -> None:
        """Let a node keep a copy of the states of a text, if there is room for one."""
        if self.most_kept and self._can_copy and self.memory is not None:
            slot = self.fork(source)
            assert slot is not None
            if self._is_found(node):
                self.keep(node, slot, end)
            else:  # it made room for the copy
                self.free.append(slot)

    def fork_kept(self, node: PrefixNode) -> int:
        """A slot that holds what a node keeps; the very one of the node where there is no room for another."""
        source = node.state
        assert source is not None
        del self.kept[node]  # for now, so that making room takes another
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
        """Let a node keep no states."""
        if node.state is not None:
            del self.kept[node]
            self.free.append(node.state)
            node.state = None

    def reusable(self, match: PrefixMatch, size: int) -> tuple[PrefixMatch, PrefixNode | None]:
        """The longest part of a match whose states a node keeps, and that node. size: positions of a block."""
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

    def forget(self, held: Sequence[int | None]) -> None:
        """No node keeps any states, and all slots but these are free."""
        self.kept.clear()
        count = 0 if self.memory is None else self.memory.count
        self.free = [slot for slot in range(count - 1, -1, -1) if slot not in held]
