"""Sliding-window blocks: a sequence holds those of its window and releases earlier ones.

A window block accompanies each full-attention block, with the same index, as long as a future token sees it. Then the
slot releases it. In the prefix index, its node keeps it cached until its room is needed. So a prefix can be reused
wherever the blocks of its last window are still cached: at the end of an answer or a prompt, and earlier if memory
allows.

Each slot reserves as many window blocks as steps of one block of positions need. Longer prompt chunks take more while
they run, if there are more.
"""

import weakref
from collections.abc import Mapping, Sequence

from onward.cache.budget import BlockAccounts, CacheBudget
from onward.cache.kinds import first_seen, window_blocks
from onward.cache.paged import WindowBlocks
from onward.cache.prefix_index import NO_MATCH, PrefixMatch, PrefixNode
from onward.cache.slot import Slot


class WindowPool(BlockAccounts):
    """The sliding-window blocks. Without sliding layers there is no memory, and every prefix can be reused.

    reserved: how many blocks slots may have together. Slots may share blocks, so they hold no more than that.
    """

    def __init__(self, memory: WindowBlocks | None, size: int, warm_blocks: int, budget: CacheBudget) -> None:
        super().__init__(memory, budget.prices.window, warm_blocks, budget)
        self.memory = memory
        self._size = size
        self._window = 1 if memory is None else memory.window
        self._max_blocks = 0 if memory is None else window_blocks(self._window, size)
        budget.windows = weakref.proxy(self)

    def most(self, blocks: int) -> int:
        """The number of window blocks reserved for a slot of `blocks` blocks."""
        return min(blocks, self._max_blocks)

    def can_reserve(self, more: int) -> bool:
        """Whether the pool has this many more, budget aside."""
        return self.reserved + more <= len(self.holders)

    def reserve(self, slot: Slot, count: int) -> None:
        """Let a slot have up to `count` blocks."""
        self.reserved += count - slot.max_windows
        slot.max_windows = count

    def seen(self, positions: int) -> range:
        """The indices of the earlier blocks that a token at `positions` sees."""
        first = first_seen(self._window, positions, self._size) // self._size
        return range(first, -(-positions // self._size))

    def missing(self, slot: Slot, first: int, last: int) -> list[int]:
        """The indices of the blocks of positions first … last - 1 that the slot lacks, within its length."""
        if self.memory is None:
            return []
        indices = range(first // self._size, min(-(-last // self._size), len(slot.blocks)))
        return [index for index in indices if index not in slot.windows]

    def holds(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode | None]) -> bool:
        """Whether the window of a token at `positions` is available. nodes: those of the slot's first blocks."""
        return self.memory is None or all(
            index in slot.windows or _window_of(nodes, index) is not None for index in self.seen(positions)
        )

    def reusable(self, match: PrefixMatch) -> PrefixMatch:
        """The longest part of a match whose window is cached."""
        if self.memory is None:
            return match
        path, partial, common = match
        nodes = path if partial is None else [*path, partial]
        if all(nodes[index].window is not None for index in self.seen(len(path) * self._size + common)):
            return match
        for depth in range(len(path), 0, -1):
            if all(path[index].window is not None for index in self.seen(depth * self._size)):
                return PrefixMatch(path[:depth], None, 0)
        return NO_MATCH

    def begin(self, slot: Slot, positions: int, windows: Mapping[int, int]) -> None:
        """Let a slot share the full blocks, of these, that a token at `positions` sees."""
        if self.memory is not None:
            full = positions // self._size
            shared = {index: windows[index] for index in self.seen(positions) if index < full}
            self.hold(shared.values())
            slot.place_windows(shared)

    def fork(self, slot: Slot, fork: Slot, positions: int, nodes: Sequence[PrefixNode | None]) -> None:
        """Give a fork the window of a token at `positions`: full blocks are shared, a partial block is copied."""
        if self.memory is not None:
            found = {index: _window_of(nodes, index) for index in self.seen(positions)}
            windows = {index: block for index, block in found.items() if block is not None} | slot.windows
            self.begin(fork, positions, windows)
            self.copy_part(fork, positions, windows.get(positions // self._size))

    def copy_part(self, slot: Slot, positions: int, source: int | None) -> None:
        """Copy the part of block `source` before `positions` to a new block of the slot."""
        index, part = divmod(positions, self._size)
        if self.memory is not None and part and source is not None:
            self.hold([source])  # making room must not take it
            own = self.take()
            slot.place_windows({**slot.windows, index: own})
            self.memory.copy(source, own, part)
            self.drop([source])
            self.let_go([source])

    def provide(self, slot: Slot, missing: Sequence[int]) -> None:
        """Allocate the blocks with these indices, within the slot's reservation."""
        for index in missing:
            slot.place_windows({**slot.windows, index: self.take()})

    def pass_on(self, slot: Slot, positions: int) -> None:
        """Release the blocks that no token from `positions` on sees, and the reservation of a long chunk."""
        if self.memory is not None:
            first = self.seen(positions).start
            self._let_go_of(slot, [index for index in slot.windows if index < first])
            self.reserve(slot, max(self.most(len(slot.blocks)), len(slot.windows)))

    def cut(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode | None]) -> None:
        """Release the blocks past `positions`, and hold cached blocks that a token there sees again."""
        if self.memory is None:
            return
        seen = self.seen(positions)
        found = {index: _window_of(nodes, index) for index in seen if index not in slot.windows}
        again = {index: block for index, block in found.items() if block is not None}
        self.hold(again.values())
        slot.place_windows({**again, **slot.windows})
        self._let_go_of(slot, [index for index in slot.windows if index not in seen])
        self.reserve(slot, max(self.most(len(slot.blocks)), len(slot.windows)))

    def own_last(self, slot: Slot, positions: int) -> None:
        """Make the block that is cut at `positions` private to the slot."""
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
            self.let_go(blocks)  # the first ones are evicted first: a sequence is continued at its end

    def publish(self, slot: Slot, index: int, node: PrefixNode) -> None:
        """Share the slot's block of this index with a node, unless the node has one."""
        block = slot.windows.get(index)
        if block is not None and node.window is None and self.nodes[block] is None:
            node.window, self.nodes[block] = block, node

    def lose(self, node: PrefixNode) -> None:
        if node.window is not None:
            if self.cached.pop(node, None) is not None:
                self.warm.append(node.window)
            self._unlink(node)

    def release(self, slot: Slot, path: Sequence[PrefixNode]) -> None:
        """Release all blocks of a slot. path: the last nodes of its sequence, which were just used."""
        for node in path:
            self.touch(node)
        self._let_go_of(slot, list(slot.windows))
        self.reserve(slot, 0)

    def forget(self, slots: Sequence[Slot]) -> None:
        """Empty the cache; slots keep only blocks within their length."""
        for slot in slots:
            windows = {index: block for index, block in slot.windows.items() if index < len(slot.blocks)}
            if len(windows) < len(slot.windows):
                slot.place_windows(windows)
            slot.max_windows = max(self.most(len(slot.blocks)), len(windows))
        self.recount([slot.windows.values() for slot in slots])
        self.reserved = sum(slot.max_windows for slot in slots)

    def _unlink(self, node: PrefixNode) -> int:
        block = node.window
        assert block is not None, "only a node with a window block is unlinked"
        node.window = self.nodes[block] = None
        return block


def _window_of(nodes: Sequence[PrefixNode | None], index: int) -> int | None:
    node = nodes[index] if index < len(nodes) else None
    return None if node is None else node.window
