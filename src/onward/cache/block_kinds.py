"""The kinds of blocks of a cache: keys and values of the whole text, sliding windows, and recurrent states.

A model has those that its layers need. Each kind says which blocks a slot needs, which of a prefix it can share, and
which it drops as the text goes on.
"""

from collections.abc import Callable, Container, Sequence
from functools import partial

from onward.cache.allocator import Allocator, BlockKind, Prefix
from onward.cache.paged import KVPool, LayerPool
from onward.cache.plan import first_seen, window_blocks
from onward.cache.slot import PrefixMatch, PrefixNode, Slot
from onward.ops.recurrent_state import STATE_BLOCK

Copies = list[Callable[[], None]]


def kinds_of(memory: KVPool, size: int, cached_blocks: int, warm_blocks: int) -> list[BlockKind]:
    """The kinds of a memory. size: positions of a block. cached_blocks: as many cached states take as much memory."""
    kinds: list[BlockKind] = [WholeText(0, memory, memory.block_nbytes, size, warm_blocks)]
    if memory.windows is not None:
        kinds.append(SlidingWindow(1, memory.windows, memory.windows.block_nbytes, size, warm_blocks))
    if memory.states is not None:
        kinds.append(RecurrentStates(len(kinds), memory.states, memory.states.nbytes, size, warm_blocks))
        affordable = cached_blocks * memory.states.block_nbytes // memory.states.nbytes
        kinds[-1].max_cached = min(affordable, memory.states.count // 2)
    return kinds


class WholeText(BlockKind):
    """Keys and values of all positions. A node of the prefix index exists as long as it has such a block."""

    def most(self, blocks: int) -> int:
        return blocks

    def count_of(self, slots: Sequence[Slot]) -> int:
        return len({block for slot in slots for block in slot.blocks})

    def blocks_of(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode]) -> dict[int, int]:
        return dict(enumerate(slot.blocks[: -(-positions // self.size)]))

    def restored(self, slot: Slot, first: int, end: int) -> Sequence[int]:
        return range(first, end)

    def block_of(self, slot: Slot, at: int) -> int:
        return slot.blocks[at]

    def need(self, prefix: Prefix, blocks: int) -> int:
        full = prefix.positions // self.size
        # Blocks that are only cached now will be held.
        return blocks - full + sum(not self.holders[prefix.blocks[self.number][index]] for index in range(full))

    def share(self, slot: Slot, prefix: Prefix, blocks: int, full: int) -> None:
        shared = [prefix.blocks[self.number][index] for index in range(full)]
        self.hold(shared)
        slot.place(shared)

    def begin(self, slot: Slot, prefix: Prefix, blocks: int, allocator: Allocator) -> Copies:
        full, part = divmod(prefix.positions, self.size)
        own = [allocator.take(self) for _ in range(blocks - full)]
        slot.place([*slot.blocks, *own])
        source = prefix.blocks[self.number][full] if part else None
        # The block to copy from may be the only one that could be taken. Then its content is already in place.
        return [] if source is None or source == own[0] else [partial(self.memory.copy, source, own[0], part)]

    def more(self, slot: Slot, blocks: int) -> int:
        return max(0, blocks - len(slot.blocks))

    def extend(self, slot: Slot, blocks: int, allocator: Allocator) -> None:
        if more := self.more(slot, blocks):
            slot.place([*slot.blocks, *(allocator.take(self) for _ in range(more))])

    def leave(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode]) -> None:
        path = [block for node in nodes[slot.noted :] if (block := node.blocks[self.number]) is not None]
        self.hold(path)
        self.drop(reversed(slot.blocks[slot.noted :]))
        self.drop(reversed(path))
        self.drop(reversed(slot.blocks[: slot.noted]))
        slot.place([])


class SlidingWindow(BlockKind):
    """Keys and values of the positions that a later token sees in sliding layers.

    A window block accompanies each block of the whole text, with the same index, as long as a future token sees it.
    Then the slot drops it. In the prefix index, its node keeps it cached until its room is needed. So a prefix can be
    reused wherever the blocks of its last window are still cached: at the end of an answer or a prompt, and earlier if
    memory allows.

    Each slot reserves as many as steps of one block of positions need. Longer prompt chunks take more while they run,
    if there are more. Slots may share blocks, so they hold no more than is reserved.
    """

    def __init__(self, number: int, memory: LayerPool, nbytes: int, size: int, warm_blocks: int) -> None:
        super().__init__(number, memory, nbytes, size, warm_blocks)
        self._max_blocks = window_blocks(memory.window, size)
        self._reserved = 0
        self.max_step = size

    @property
    def claimed(self) -> int:
        return self._reserved

    def most(self, blocks: int) -> int:
        return min(blocks, self._max_blocks)

    def count_of(self, slots: Sequence[Slot]) -> int:
        return sum(slot.max_windows for slot in slots)

    def seen(self, positions: int) -> range:
        """The indices of the earlier blocks that a token at `positions` sees."""
        first = first_seen(self.memory.window, positions, self.size) // self.size
        return range(first, -(-positions // self.size))

    def blocks_of(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode]) -> dict[int, int] | None:
        seen = self.seen(positions)
        found = {index: nodes[index].blocks[self.number] for index in seen if index < len(nodes)} | slot.windows
        blocks = {index: block for index in seen if (block := found.get(index)) is not None}
        return blocks if len(blocks) == len(seen) else None

    def is_usable(self, match: PrefixMatch) -> bool:
        return all(match.nodes[index].blocks[self.number] is not None for index in self.seen(match.positions))

    def is_restorable(self, slot: Slot, stored: Sequence[Container[int]], first: int, end: int) -> bool:
        return all(self.number in stored[at] for at in self.restored(slot, first, end))

    def restored(self, slot: Slot, first: int, end: int) -> Sequence[int]:
        # The slot may have a part of block `first`, or none of it.
        return [at for at in self.seen(end * self.size) if at >= first]

    def block_of(self, slot: Slot, at: int) -> int:
        return slot.windows[at]

    def restore(self, slot: Slot, end: int, allocator: Allocator) -> None:
        """Allocate the window of a slot that continues after its first `end` blocks, in place of its present one."""
        self.pass_on(slot, end * self.size)
        missing = [at for at in self.seen(end * self.size) if at not in slot.windows]
        has_room = self.provide(slot, missing, allocator)
        assert has_room, "every slot has reserved a window"

    def _part(self, prefix: Prefix) -> int | None:
        """The block of a prefix that a slot continues with a copy of."""
        index, part = divmod(prefix.positions, self.size)
        return prefix.blocks[self.number].get(index) if part else None

    def need(self, prefix: Prefix, blocks: int) -> int:
        source = self._part(prefix)  # one more while it is copied
        copied = source is not None and (prefix.match is not None or not self.holders[source])
        return self.most(blocks) + copied

    def share(self, slot: Slot, prefix: Prefix, blocks: int, full: int) -> None:
        self._reserve(slot, self.most(blocks))
        found = prefix.blocks[self.number]
        shared = {index: found[index] for index in self.seen(prefix.positions) if index < full and index in found}
        self.hold(shared.values())
        slot.place_windows(shared)

    def begin(self, slot: Slot, prefix: Prefix, blocks: int, allocator: Allocator) -> Copies:
        source = self._part(prefix)
        if source is None:
            return []
        index, part = divmod(prefix.positions, self.size)
        own = allocator.take_copy(self, source)
        slot.place_windows({**slot.windows, index: own})
        return [partial(self.memory.copy, source, own, part)]

    def publish(self, slot: Slot, index: int, node: PrefixNode) -> None:
        """Share the slot's block of this index with a node, unless the node has one."""
        block = slot.windows.get(index)
        if block is not None and node.blocks[self.number] is None and self.nodes[block] is None:
            self.link(node, block)

    def missing(self, slot: Slot, first: int, last: int) -> list[int]:
        """The indices of the blocks of positions first … last - 1 that the slot lacks, within its length."""
        indices = range(first // self.size, min(-(-last // self.size), len(slot.blocks)))
        return [index for index in indices if index not in slot.windows]

    def provide(self, slot: Slot, missing: Sequence[int], allocator: Allocator) -> bool:
        """Allocate the blocks with these indices. Returns False if there is no room."""
        if not self._claim(slot, len(slot.windows) + len(missing), allocator):
            return False
        for index in missing:
            slot.place_windows({**slot.windows, index: allocator.take(self)})
        return True

    def max_chunk(self, slot: Slot, first: int, count: int, allocator: Allocator) -> int:
        """As many of `count` prompt ids from position `first` on as there are blocks for, which are reserved."""
        while count > self.size:
            if self._claim(slot, len(slot.windows) + len(self.missing(slot, first, first + count)), allocator):
                break
            count = max(self.size, count // 2)
        return count

    def more(self, slot: Slot, blocks: int) -> int:
        return max(0, self.most(blocks) - slot.max_windows)

    def extend(self, slot: Slot, blocks: int, allocator: Allocator) -> None:
        self._reserve(slot, slot.max_windows + self.more(slot, blocks))

    def pass_on(self, slot: Slot, positions: int) -> None:
        """Drop the blocks that no token from `positions` on sees, and the reservation of a long chunk."""
        first = self.seen(positions).start
        self._let_go_of(slot, [index for index in slot.windows if index < first])
        self._reserve(slot, max(self.most(len(slot.blocks)), len(slot.windows)))

    def leave(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode]) -> None:
        for node in nodes[slot.noted :]:
            self.touch(node)
        self._let_go_of(slot, list(slot.windows))
        self._reserve(slot, 0)

    def _claim(self, slot: Slot, count: int, allocator: Allocator) -> bool:
        """Reserve at least `count` blocks for a slot. Returns False if there is no room now."""
        if count > slot.max_windows:
            if not allocator.has_room(self, count - slot.max_windows):
                return False
            self._reserve(slot, count)
        return True

    def _reserve(self, slot: Slot, count: int) -> None:
        """Let a slot have up to `count` blocks."""
        self._reserved += count - slot.max_windows
        slot.max_windows = count

    def _let_go_of(self, slot: Slot, indices: Sequence[int]) -> None:
        if indices:
            blocks = [slot.windows[index] for index in sorted(indices)]
            slot.place_windows({index: block for index, block in slot.windows.items() if index not in indices})
            self.drop(blocks)  # the first ones are evicted first: a sequence is continued at its end


class RecurrentStates(BlockKind):
    """The recurrent states of a sequence, which are those after its last positions; each slot has its own.

    A node may have the states after its tokens. They have a limit of their own, `max_cached`.
    """

    max_step = STATE_BLOCK

    def cool(self, warm: int) -> None:
        """Their memory stays."""

    def most(self, blocks: int) -> int:
        return 1

    def count_of(self, slots: Sequence[Slot]) -> int:
        return len(slots)

    def blocks_of(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode]) -> dict[int, int] | None:
        assert slot.state is not None, "every slot has states"
        last = -(-positions // self.size) - 1
        return {last: slot.state} if self.memory.holds(slot.state, positions) else None

    def is_usable(self, match: PrefixMatch) -> bool:
        node, positions = match.nodes[-1], match.positions
        state = node.blocks[self.number]
        return state is not None and positions <= node.state_end and self.memory.holds(state, positions)

    def is_final(self, node: PrefixNode, at: int) -> bool:
        return node.state_end == (at + 1) * self.size

    def is_restorable(self, slot: Slot, stored: Sequence[Container[int]], first: int, end: int) -> bool:
        return self.number in stored[end - 1]

    def restored(self, slot: Slot, first: int, end: int) -> Sequence[int]:
        return [end - 1]

    def block_of(self, slot: Slot, at: int) -> int:
        assert slot.state is not None, "every slot has states"
        return slot.state

    def need(self, prefix: Prefix, blocks: int) -> int:
        return 1

    def more(self, slot: Slot, blocks: int) -> int:
        return 0

    def extend(self, slot: Slot, blocks: int, allocator: Allocator) -> None:
        """A longer sequence has no more states."""

    def share(self, slot: Slot, prefix: Prefix, blocks: int, full: int) -> None:
        """States are never shared."""

    def pin(self, slot: Slot, prefix: Prefix, blocks: int) -> None:
        slot.state = prefix.blocks[self.number].get(blocks - 1)
        if slot.state is not None:
            self.hold([slot.state])

    def begin(self, slot: Slot, prefix: Prefix, blocks: int, allocator: Allocator) -> Copies:
        """A copy of the prefix's states, or these themselves if there is no room."""
        source = prefix.blocks[self.number].get(-(-prefix.positions // self.size) - 1)
        if source is None:
            slot.state = allocator.take(self)
            return [partial(self.memory.clear, slot.state)]
        self.hold([source])
        if allocator.has_room(self, 1):
            slot.state = allocator.take(self)
            self.drop([source])
            return [partial(self.memory.copy, source, slot.state)]
        node = self.nodes[source]
        assert node is not None, "a slot's own states are copied"
        self.unlink(node)
        slot.state = source
        return []

    def leave(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode]) -> None:
        """Drop a slot's states, which stay cached at the node of its last position."""
        if slot.state is None:
            return
        is_found = (
            positions > 0 and len(nodes) == -(-positions // self.size) and self.memory.holds(slot.state, positions)
        )
        if is_found and self.nodes[slot.state] is None:
            self._keep(nodes[-1], slot.state, positions)
        self.drop([slot.state])
        slot.state = None

    def snapshot(self, slot: Slot, end: int, find: Callable[[], PrefixNode | None], allocator: Allocator) -> None:
        """Cache a copy of the states after a slot's first `end` positions, if there is room for one, at the node that
        `find` returns."""
        if not self.max_cached or slot.state is None or not self.memory.holds(slot.state, end):
            return
        node = find()
        if node is None or node.blocks[self.number] is not None or not allocator.has_room(self, 1):
            return
        own = allocator.take(self)
        try:
            self.memory.copy(slot.state, own)
            if node.blocks[0] is not None:  # else it was evicted to make room for the copy
                self._keep(node, own, end)
        finally:
            self.drop([own])

    def _keep(self, node: PrefixNode, state: int, end: int) -> None:
        """Give a slot's states to a node in place of its own, unless somebody holds these."""
        own = node.blocks[self.number]
        if own is None or not self.holders[own]:
            self.unlink(node)
            node.state_end = end
            self.link(node, state)

    def max_chunk(self, slot: Slot, first: int, count: int) -> int:
        """If states can be cached, up to the last end of a block, since states are cached only there, or to where the
        prompt diverges from an earlier one, since a third may diverge there too (arXiv 2411.19379)."""
        end = (first + count) // self.size * self.size
        if not self.max_cached or end <= first:
            return count
        return (slot.branch if first < slot.branch < end else end) - first
