"""Blocks of sliding layers: a text has those of its window and gives the ones before back.

A window block lies beside each block of the layers that keep everything, under the same index, as long as a token that
is still to come sees it. Then the slot lets it go. Where the text can be found its node in the trie has it on, and it
stays until somebody needs the room. So a prefix can be reused wherever the blocks of its last window are still there:
at the end of an answer, at that of a prompt, and further back as memory allows.

A slot may always have as many of these blocks as steps of one block of positions need; they are reserved for it.
Longer pieces of prompts take more for as long as they run, if there are more.
"""

import weakref
from collections.abc import Mapping, Sequence

from onward.cache.allocator import BlockAccounts
from onward.cache.budget import CacheBudget
from onward.cache.kinds import first_seen, window_blocks
from onward.cache.paged import WindowBlocks
from onward.cache.prefix_index import PrefixMatch, PrefixNode
from onward.cache.slot import Slot


class WindowPool(BlockAccounts):
    """Who has which window block: slots, and nodes of the trie.

    Where no layer slides there is no memory: then slots have none, and every prefix can be reused.

    reserved: how many blocks slots may have, all together. Slots may share some, so they hold no more than that.
    """

    def __init__(self, memory: WindowBlocks | None, size: int, warm_blocks: int, budget: CacheBudget) -> None:
        super().__init__(memory, budget.prices.window, warm_blocks, budget)
        self.memory = memory
        self.reserved = 0
        self._size = size
        self._window = 1 if memory is None else memory.window
        self._most = 0 if memory is None else window_blocks(self._window, size)
        budget.windows = weakref.proxy(self)

    def most(self, blocks: int) -> int:
        """How many window blocks are reserved for a text of so many blocks."""
        return min(blocks, self._most)

    def can_reserve(self, more: int) -> bool:
        """Whether the memory has so many more, as far as slots are concerned; the budget is asked elsewhere."""
        return self.reserved + more <= len(self.holders)

    def reserve(self, slot: Slot, count: int) -> None:
        """Let a slot have up to `count` blocks."""
        self.reserved += count - slot.max_windows
        slot.max_windows = count

    # Which blocks a text needs

    def seen(self, positions: int) -> range:
        """The indices of the blocks before `positions` that a token there sees."""
        first = first_seen(self._window, positions, self._size) // self._size
        return range(first, -(-positions // self._size))

    def missing(self, slot: Slot, first: int, last: int) -> list[int]:
        """The indices of the blocks of positions first … last - 1, within the slot's length, that it does not have."""
        if self.memory is None:
            return []
        indices = range(first // self._size, min(-(-last // self._size), len(slot.blocks)))
        return [index for index in indices if index not in slot.windows]

    def holds(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode | None]) -> bool:
        """Whether a token at `positions` would find all that it sees. nodes: those of the first blocks of the slot."""
        return self.memory is None or all(
            index in slot.windows or _kept(nodes, index) is not None for index in self.seen(positions)
        )

    def reusable(self, match: PrefixMatch) -> PrefixMatch:
        """The longest part of a match after which a token finds all that it sees."""
        if self.memory is None:
            return match
        path, partial, common = match
        nodes = path if partial is None else [*path, partial]
        if all(nodes[index].window is not None for index in self.seen(len(path) * self._size + common)):
            return match
        for depth in range(len(path), 0, -1):
            if all(path[index].window is not None for index in self.seen(depth * self._size)):
                return PrefixMatch(path[:depth], None, 0)
        return PrefixMatch([], None, 0)

    # What slots hold

    def begin(self, slot: Slot, positions: int, windows: Mapping[int, int]) -> None:
        """Let a slot hold those of these full blocks, by index, that a token at `positions` sees."""
        if self.memory is not None:
            full = positions // self._size
            shared = {index: windows[index] for index in self.seen(positions) if index < full}
            self.hold(shared.values())
            slot.place_windows(shared)

    def fork(self, slot: Slot, fork: Slot, positions: int, nodes: Sequence[PrefixNode | None]) -> None:
        """Let a fork have what a token at `positions` sees: full blocks are shared, the part of one is copied."""
        if self.memory is not None:
            found = {index: _kept(nodes, index) for index in self.seen(positions)}
            windows = {index: block for index, block in found.items() if block is not None} | slot.windows
            self.begin(fork, positions, windows)
            self.copy_part(fork, positions, windows.get(positions // self._size))

    def copy_part(self, slot: Slot, positions: int, source: int | None) -> None:
        """Let a slot have its own copy of block `source`, which it begins to share at `positions`."""
        index, part = divmod(positions, self._size)
        if self.memory is not None and part and source is not None:
            self.hold([source])  # making room must not take it
            own = self.take()
            slot.place_windows({**slot.windows, index: own})
            self.memory.copy(source, own, part)
            self.drop([source])
            self.let_go([source])

    def provide(self, slot: Slot, missing: Sequence[int]) -> None:
        """Take blocks of these indices, within what is reserved for the slot."""
        for index in missing:
            slot.place_windows({**slot.windows, index: self.take()})

    def pass_on(self, slot: Slot, positions: int) -> None:
        """Let go of the blocks that no token from `positions` on sees, and of what only a long piece needed."""
        if self.memory is not None:
            first = self.seen(positions).start
            self._let_go_of(slot, [index for index in slot.windows if index < first])
            self.reserve(slot, max(self.most(len(slot.blocks)), len(slot.windows)))

    def cut(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode | None]) -> None:
        """Let go of the blocks past `positions`, and take again those before that a token there sees and nodes have."""
        if self.memory is None:
            return
        seen = self.seen(positions)
        again = {}
        for index in seen:
            kept = _kept(nodes, index)
            if index not in slot.windows and kept is not None:
                again[index] = kept
        self.hold(again.values())
        slot.place_windows({**again, **slot.windows})
        self._let_go_of(slot, [index for index in slot.windows if index not in seen])
        self.reserve(slot, max(self.most(len(slot.blocks)), len(slot.windows)))

    def own_last(self, slot: Slot, positions: int) -> None:
        """See that nobody else can see the block of `positions`, which is cut there."""
        index, part = divmod(positions, self._size)
        block = slot.windows.get(index)
        if block is None or not part:
            return
        if self.holders[block] > 1:
            self._let_go_of(slot, [index])
            self.copy_part(slot, positions, block)
        elif (node := self.nodes[block]) is not None:
            self.lose(node)

    def _let_go_of(self, slot: Slot, indices: Sequence[int]) -> None:
        if indices:
            blocks = [slot.windows[index] for index in sorted(indices)]
            slot.place_windows({index: block for index, block in slot.windows.items() if index not in indices})
            self.drop(blocks)
            self.let_go(blocks)  # the first ones are evicted first: the end of a text is what goes on

    # What can be found

    def publish(self, slot: Slot, index: int, node: PrefixNode) -> None:
        """Let a node have the slot's block of this index, unless it has one."""
        block = slot.windows.get(index)
        if block is not None and node.window is None and self.nodes[block] is None:
            node.window, self.nodes[block] = block, node

    def lose(self, node: PrefixNode) -> None:
        """A node can be found no more, and its block neither."""
        if node.window is not None:
            if self.cached.pop(node, None) is not None:
                self.warm.append(node.window)
            self._unlink(node)

    def release(self, slot: Slot, path: Sequence[PrefixNode]) -> None:
        """Let go of all that a slot has. path: the last nodes of its text, which were used just now."""
        for node in path:
            self.touch(node)
        self._let_go_of(slot, list(slot.windows))
        self.reserve(slot, 0)

    def forget(self, slots: Sequence[Slot]) -> None:
        """Nothing can be found any more; only what slots hold is held, but for what lies past their end."""
        for slot in slots:
            windows = {index: block for index, block in slot.windows.items() if index < len(slot.blocks)}
            if len(windows) < len(slot.windows):
                slot.place_windows(windows)
            slot.max_windows = max(self.most(len(slot.blocks)), len(windows))
        self.recount([slot.windows.values() for slot in slots])
        self.reserved = sum(slot.max_windows for slot in slots)

    def _unlink(self, node: PrefixNode) -> int:
        block = node.window
        assert block is not None, "a node has the block that is taken from it"
        node.window = self.nodes[block] = None
        return block


def _kept(nodes: Sequence[PrefixNode | None], index: int) -> int | None:
    """The window block that the node of a block has."""
    node = nodes[index] if index < len(nodes) else None
    return None if node is None else node.window
