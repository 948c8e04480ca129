"""Which blocks are free, held and cached: of every kind, under one budget of memory.

A block is free, held by one or more slots, or cached: no slot holds it, but the prefix index can find it. A slot that
holds a block of the prefix index also holds its parent. So cached blocks can always be evicted, leaves first.

On the CPU, memory that was never written takes no space, so each kind may use what the others leave. One number bounds
them all, in the largest unit that divides the blocks of keys and values; with a single kind the unit is a block.
"""

import itertools
import math
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from onward.cache.slot import PrefixMatch, PrefixNode, Slot


class Prefix(NamedTuple):
    """The first `positions` positions of a new slot.

    blocks: for each kind, those that hold them, by their index in the text. match: if they are in the prefix index;
    otherwise another slot holds them.
    """

    positions: int
    blocks: Sequence[dict[int, int]]
    match: PrefixMatch | None = None


class BlockKind(ABC):
    """The blocks of one kind, and the rules by which slots have them.

    number: of the kind, from 0 on: `PrefixNode.blocks` has this order. nbytes: of a block; price: in units of the
    budget. size: positions of a block of keys and values.
    warm_blocks: how many free blocks keep their memory, so that consecutive short requests do not return it and fault
    it in again; up to twice as many do, since memory is returned in batches.

    holders: the number of holders of each block. nodes: its node in the prefix index, if any. cached: nodes whose block
    has no holder, with the time of last use; the oldest first. max_cached: the most of them, if they are not limited
    with the blocks of other kinds.

    links: for each block, how often it was given to a node: while its node and this number stay, so do its contents.
    on_link, on_unlink: called after a node gets a block, and before it loses one whose contents are still there.
    """

    # The most tokens of a step if any of them may be removed again.
    max_step: int = sys.maxsize
    max_cached: int | None = None
    on_link: Callable[[PrefixNode], None] | None = None
    on_unlink: Callable[[PrefixNode], None] | None = None

    def __init__(self, number: int, memory: Any, nbytes: int, size: int, warm_blocks: int) -> None:
        self.number, self.memory, self.nbytes, self.size, self.warm_blocks = number, memory, nbytes, size, warm_blocks
        self.count: int = memory.count
        self.price = 0
        self.clock: Iterator[int] = itertools.count()
        self.holders = [0] * self.count
        self.nodes: list[PrefixNode | None] = [None] * self.count
        self.links = [0] * self.count
        self.cached: OrderedDict[PrefixNode, int] = OrderedDict()
        self.warm: list[int] = []
        self.cold = list(range(self.count - 1, -1, -1))

    # ── accounts ──

    @property
    def used(self) -> int:
        """The number of blocks that are held or cached."""
        return self.count - len(self.warm) - len(self.cold)

    @property
    def claimed(self) -> int:
        """The number of blocks that slots hold or reserve."""
        return self.used - len(self.cached)

    def has(self, more: int) -> bool:
        """Whether this many more can be held, budget aside."""
        return more <= self.count - self.claimed

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that are held or cached."""
        for block in blocks:
            if not self.holders[block]:
                node = self.nodes[block]
                assert node is not None, f"block {block} is free: it has no holder and no node"
                del self.cached[node]
            self.holders[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Remove a holder from blocks. Those without holders become cached, or free if they have no node. The first
        ones are evicted first."""
        for block in blocks:
            self.holders[block] -= 1
            node = self.nodes[block]
            if self.holders[block]:
                continue
            if node is None:
                self.warm.append(block)
            else:
                self.cached[node] = next(self.clock)

    def touch(self, node: PrefixNode) -> None:
        """Mark the cached block of a node as just used."""
        if node in self.cached:
            self.cached[node] = next(self.clock)
            self.cached.move_to_end(node)

    def link(self, node: PrefixNode, block: int) -> None:
        """Give a held block to a node."""
        assert self.nodes[block] is None, f"block {block} is already in the prefix index"
        self.links[block] += 1
        node.blocks[self.number], self.nodes[block] = block, node
        if self.on_link is not None:
            self.on_link(node)

    def unlink(self, node: PrefixNode) -> None:
        """Take a node's block from it, if it has one."""
        block = node.blocks[self.number]
        if block is not None:
            if self.on_unlink is not None:
                self.on_unlink(node)
            node.blocks[self.number] = self.nodes[block] = None
            if self.cached.pop(node, None) is not None:
                self.warm.append(block)

    def cool(self, warm: int) -> None:
        """Return the memory of all free blocks but the `warm` last used ones."""
        cooled = sorted(self.warm[: len(self.warm) - warm])
        if cooled:
            self.memory.give_back(cooled)
            del self.warm[: len(cooled)]
            self.cold.extend(reversed(cooled))

    # ── rules ──

    @abstractmethod
    def most(self, blocks: int) -> int:
        """The number of blocks for a slot of `blocks` blocks of positions."""

    @abstractmethod
    def count_of(self, slots: Sequence[Slot]) -> int:
        """The number of blocks that these slots claim together."""

    @abstractmethod
    def blocks_of(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode]) -> dict[int, int] | None:
        """The blocks for continuing from an earlier position of a slot, by their index; None if some are gone. nodes:
        of the slot's first blocks."""

    def is_usable(self, match: PrefixMatch) -> bool:
        """Whether a slot can continue from the end of a match."""
        return True

    def is_final(self, node: PrefixNode, at: int) -> bool:
        """Whether a sequence can continue after a node, block `at` of its text, with the block of this kind."""
        return True

    def is_restorable(self, slot: Slot, stored: Sequence[Container[int]], first: int, end: int) -> bool:
        """Whether a slot that has the first `first` blocks can continue after `end` blocks, if a store has these kinds
        of each of them."""
        return True

    @abstractmethod
    def restored(self, slot: Slot, first: int, end: int) -> Sequence[int]:
        """The indices of the stored blocks that it needs for that, if it has the first `first` ones."""

    @abstractmethod
    def block_of(self, slot: Slot, at: int) -> int:
        """The slot's own block of an index of its text."""

    @abstractmethod
    def need(self, prefix: Prefix, blocks: int) -> int:
        """How many blocks a new slot of `blocks` blocks of positions claims."""

    @abstractmethod
    def share(self, slot: Slot, prefix: Prefix, blocks: int, full: int) -> None:
        """Let a slot hold those of the first `full` blocks that a token at the end of a prefix needs."""

    def pin(self, slot: Slot, prefix: Prefix, blocks: int) -> None:
        """Let a slot hold all of a prefix, to keep it."""
        self.share(slot, prefix, blocks, blocks)

    @abstractmethod
    def begin(self, slot: Slot, prefix: Prefix, blocks: int, allocator: "Allocator") -> list[Callable[[], None]]:
        """Allocate the slot's own blocks. Returns copies to be made before its first forward."""

    @abstractmethod
    def more(self, slot: Slot, blocks: int) -> int:
        """How many blocks a slot lacks for `blocks` blocks of positions."""

    @abstractmethod
    def extend(self, slot: Slot, blocks: int, allocator: "Allocator") -> None:
        """Allocate the blocks that a slot lacks for `blocks` blocks of positions."""

    @abstractmethod
    def leave(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode]) -> None:
        """Drop all blocks of a slot. nodes: of its first `positions` positions, as far as they can be found."""


class Allocator:
    """The blocks of all kinds, under one budget.

    kinds: blocks of keys and values of the whole text first; then sliding windows and recurrent states, if any.
    unit: bytes. total: the number of units. max_cached: the most units of cached blocks.
    """

    def __init__(self, kinds: Sequence[BlockKind], nbytes: int | None, max_cached: int) -> None:
        self.kinds = kinds
        self.unit = math.gcd(*(kind.nbytes for kind in kinds if kind.max_cached is None))
        clock = itertools.count()
        for kind in kinds:
            kind.price, kind.clock = -(-kind.nbytes // self.unit), clock
        total = sum(kind.count * kind.price for kind in kinds)
        self.total = total if nbytes is None else min(total, nbytes // self.unit)
        self.max_cached = max_cached

    @property
    def available(self) -> int:
        """Units that can be allocated now: free or cached, and not reserved."""
        return self.total - sum([kind.claimed * kind.price for kind in self.kinds])

    @property
    def cached(self) -> int:
        """Units that are cached."""
        return sum([len(kind.cached) * kind.price for kind in self.kinds])

    def cost(self, blocks: int) -> int:
        """The units of a slot of `blocks` blocks of positions."""
        return sum(kind.most(blocks) * kind.price for kind in self.kinds)

    def can_hold(self, blocks: int) -> bool:
        """Whether a slot of `blocks` blocks of positions fits without any other slot."""
        return all(kind.most(blocks) <= kind.count for kind in self.kinds) and self.cost(blocks) <= self.total

    @property
    def longest(self) -> int:
        """The blocks of positions of the longest sequence that all blocks together hold."""
        blocks, step = self.kinds[0].count, sum(kind.price for kind in self.kinds)
        while blocks and self.cost(blocks) > self.total:
            blocks -= max(1, (self.cost(blocks) - self.total) // step)
        return blocks

    def cost_of(self, slots: Sequence[Slot]) -> int:
        """The units that these slots claim together."""
        return sum(kind.count_of(slots) * kind.price for kind in self.kinds)

    # ── slots ──

    def prefix(self, match: PrefixMatch) -> Prefix:
        blocks: list[dict[int, int]] = [{} for _ in self.kinds]
        for index, node in enumerate(match.nodes):
            for of_kind, block in zip(blocks, node.blocks, strict=True):
                if block is not None:
                    of_kind[index] = block
        return Prefix(match.positions, blocks, match)

    def prefix_of(self, slot: Slot, positions: int, nodes: Sequence[PrefixNode]) -> Prefix | None:
        """The first positions of a slot; None if it can't continue from there. nodes: of its first blocks."""
        found = [kind.blocks_of(slot, positions, nodes) for kind in self.kinds]
        blocks = [each for each in found if each is not None]
        return Prefix(positions, blocks) if len(blocks) == len(found) else None

    def fits(self, prefix: Prefix, blocks: int) -> bool:
        """Whether a slot of `blocks` blocks of positions that begins with a prefix can be allocated now."""
        return self._fit([kind.need(prefix, blocks) for kind in self.kinds])

    def _fit(self, needs: Sequence[int]) -> bool:
        """Whether this many more blocks of each kind can be allocated now."""
        if not all(kind.has(more) for kind, more in zip(self.kinds, needs, strict=True)):
            return False
        return sum(kind.price * more for kind, more in zip(self.kinds, needs, strict=True)) <= self.available

    def begin(self, slot: Slot, prefix: Prefix, blocks: int) -> list[Callable[[], None]]:
        """Allocate the blocks of a slot. Returns the copies to be made before its first forward."""
        for kind in self.kinds:
            kind.share(slot, prefix, blocks, prefix.positions // kind.size)
        if prefix.match is not None and prefix.match.nodes:
            self.kinds[0].touch(prefix.match.nodes[-1])  # a block that is copied in part is used too
        return [copy for kind in reversed(self.kinds) for copy in kind.begin(slot, prefix, blocks, self)]

    def extend(self, slot: Slot, blocks: int) -> bool:
        """Allocate what a slot lacks for `blocks` blocks of positions. Returns False if there is no room."""
        if not self._fit([kind.more(slot, blocks) for kind in self.kinds]):
            return False
        for kind in self.kinds:
            kind.extend(slot, blocks, self)
        return True

    def leave(self, slot: Slot, positions: int = 0, nodes: Sequence[PrefixNode] = ()) -> None:
        """Drop the blocks of a slot. nodes: of its first positions, which stay cached."""
        for kind in reversed(self.kinds):
            kind.leave(slot, positions, nodes)
        slot.length = slot.noted = 0

    def pin(self, slot: Slot, match: PrefixMatch) -> None:
        """Let a slot without blocks hold cached ones."""
        prefix, slot.noted = self.prefix(match), len(match.nodes)
        for kind in self.kinds:
            kind.pin(slot, prefix, slot.noted)
        slot.length, slot.is_pin = min(match.positions, slot.noted * self.kinds[0].size), True

    # ── blocks ──

    def has_room(self, kind: BlockKind, more: int) -> bool:
        """Whether this many more blocks of one kind can be allocated now."""
        return kind.has(more) and more * kind.price <= self.available

    def take(self, kind: BlockKind) -> int:
        """Allocate a free block, or else the least recently used cached one. The caller has checked that it fits."""
        while sum([each.used * each.price for each in self.kinds]) + kind.price > self.total and self.evict():
            pass
        if not kind.warm and not kind.cold:
            self._remove(kind, next(iter(kind.cached)))
        block = kind.warm.pop() if kind.warm else kind.cold.pop()
        kind.holders[block] = 1
        return block

    def take_copy(self, kind: BlockKind, source: int) -> int:
        """Allocate a block for a copy of another one, whose contents stay until the next allocation."""
        kind.hold([source])  # making room must not take it
        block = self.take(kind)
        kind.drop([source])
        return block

    def evict(self) -> bool:
        """Free the least recently used entry. Returns False if there is none."""
        kinds = [kind for kind in self.kinds if kind.cached]
        if not kinds:
            return False
        # Those with a limit of their own last.
        kind = min(kinds, key=lambda kind: (kind.max_cached is not None, next(iter(kind.cached.values()))))
        self._remove(kind, next(iter(kind.cached)))
        return True

    def _remove(self, kind: BlockKind, node: PrefixNode) -> None:
        if kind.number:
            kind.unlink(node)
        else:
            self.remove(node)

    def remove(self, node: PrefixNode) -> None:
        """Remove a leaf from the prefix index. Its blocks that nobody holds are free."""
        for kind in self.kinds:
            kind.unlink(node)
        node.detach()

    def settle(self) -> None:
        """Limit the cached entries, and the memory of free blocks. Call it after a change."""
        for kind in self.kinds:
            while kind.max_cached is not None and len(kind.cached) > kind.max_cached:
                kind.unlink(next(iter(kind.cached)))
        shared = [kind for kind in self.kinds if kind.max_cached is None]
        while sum(len(kind.cached) * kind.price for kind in shared) > self.max_cached:
            self.evict()
        for kind in shared:
            if len(kind.warm) > 2 * kind.warm_blocks:
                kind.cool(kind.warm_blocks)
