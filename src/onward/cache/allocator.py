"""Blocks: which are free, which are in use, and which are cached.

A block is free, held by one or more slots, or cached: no slot holds it, but the prefix index can find it. Whoever holds
a block that can be found holds its parent in the tree too. So cached blocks can always be evicted, leaves first.
"""

import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from onward.cache.budget import CacheBudget
from onward.cache.paged import KVPool, WindowBlocks
from onward.cache.prefix_index import PrefixNode, PrefixTree, Tokens
from onward.cache.states import StatePool


class BlockAccounts(ABC):
    """Which blocks of a memory are free, which somebody holds, and which are cached.

    price: of a block, in units of the budget. warm_blocks: how many free blocks keep their memory, so that short texts
    one after another do not give it back and fault it in again each; up to twice as many do, since memory is given back
    in batches.

    holders: how many hold each block. nodes: its node in the trie, if it can be found. cached: nodes whose block nobody
    holds, with the time when it was used last; the oldest first.
    """

    def __init__(self, memory: KVPool | WindowBlocks | None, price: int, warm_blocks: int, budget: CacheBudget) -> None:
        count = 0 if memory is None else memory.count
        self.price, self.warm_blocks = price, warm_blocks
        self.holders = [0] * count
        self.nodes: list[PrefixNode | None] = [None] * count
        self.cached: OrderedDict[PrefixNode, int] = OrderedDict()
        self.warm: list[int] = []
        self.cold = list(range(count - 1, -1, -1))
        self._counted, self._budget = memory, budget

    @property
    def free(self) -> int:
        return len(self.warm) + len(self.cold)

    @property
    def available(self) -> int:
        """How many blocks `take` can give, as far as the budget does."""
        return len(self.warm) + len(self.cold) + len(self.cached)

    @property
    def used(self) -> int:
        """How many are held or cached."""
        return len(self.holders) - len(self.warm) - len(self.cold)

    @property
    def held(self) -> int:
        return self.used - len(self.cached)

    @property
    def oldest(self) -> int:
        """When the block that is evicted next was used last."""
        return next(iter(self.cached.values()))

    def take(self) -> int:
        """A block of the caller's own: a free one, or else the least recently used of the cached ones."""
        self._budget.make_room(self.price)
        if not self.free:
            self.evict()
        block = self.warm.pop() if self.warm else self.cold.pop()
        self.holders[block] = 1
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for blocks that others hold or that are cached."""
        for block in blocks:
            if not self.holders[block]:
                node = self.nodes[block]
                assert node is not None, f"block {block} is free: nobody holds it and it cannot be found"
                del self.cached[node]
            self.holders[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One holder less; `let_go` says what becomes of blocks that have none."""
        for block in blocks:
            self.holders[block] -= 1

    def let_go(self, blocks: Iterable[int]) -> None:
        """After `drop`: blocks that nobody holds become cached, or free where they cannot be found. Those that come
        first are evicted first."""
        for block in blocks:
            own = self.nodes[block]
            if self.holders[block]:
                continue
            if own is None:
                self.warm.append(block)
            elif own not in self.cached:
                self.cached[own] = next(self._budget.clock)

    def touch(self, node: PrefixNode) -> None:
        """The block of a node was used just now, if nobody holds it."""
        if node in self.cached:
            self.cached[node] = next(self._budget.clock)
            self.cached.move_to_end(node)

    def evict(self) -> None:
        """Free the least recently used of the cached blocks."""
        node, _ = self.cached.popitem(last=False)
        self.warm.append(self._unlink(node))

    def cool(self) -> None:
        """Give back the memory of free blocks where too many keep it."""
        if len(self.warm) > 2 * self.warm_blocks:
            self._give_back(self.warm_blocks)

    def recount(self, held: Iterable[Iterable[int]]) -> None:
        """Nothing can be found any more; only these blocks of each holder are held, and no other keeps its memory."""
        count = len(self.holders)
        self.cached.clear()
        self.nodes[:] = [None] * count
        self.holders[:] = [0] * count
        for blocks in held:
            for block in blocks:
                self.holders[block] += 1
        cold = set(self.cold)
        self.warm[:] = [block for block in range(count) if not self.holders[block] and block not in cold]
        self.cold[:] = [block for block in range(count - 1, -1, -1) if not self.holders[block] and block in cold]
        self._give_back(0)

    @abstractmethod
    def _unlink(self, node: PrefixNode) -> int:
        """Let the block of a node be found no more; returns it."""

    def _give_back(self, warm: int) -> None:
        """Keep the memory of the `warm` free blocks that were used last; the others return theirs."""
        cooled = sorted(self.warm[: len(self.warm) - warm])
        if cooled and self._counted is not None:
            self._counted.give_back(cooled)
            del self.warm[: len(cooled)]
            self.cold.extend(reversed(cooled))


class NodeWindows(Protocol):
    """The window blocks of nodes, as far as `BlockPool` knows them: `WindowPool`."""

    def lose(self, node: PrefixNode) -> None: ...

    def cool(self) -> None: ...


class BlockPool(BlockAccounts):
    """The blocks of the layers that keep the whole text, with the trie in which they are found.

    What nobody holds is a set of whole branches, and what is let go with or after a child comes behind it. So the first
    of the cached is a leaf.

    Args:
        size: positions of a block.
        windows, states: who has blocks of sliding layers and recurrent states; those of a node go with its block.
    """

    def __init__(
        self,
        memory: KVPool,
        size: int,
        warm_blocks: int,
        budget: CacheBudget,
        windows: NodeWindows,
        states: StatePool,
    ) -> None:
        super().__init__(memory, budget.prices.block, warm_blocks, budget)
        self.windows, self.states = windows, states
        self.trie = PrefixTree(size)
        budget.blocks = weakref.proxy(self)

    @property
    def max_cached(self) -> int:
        """How many units the blocks may take that nobody holds."""
        return self._budget.max_cached

    def settle(self, blocks: Sequence[int], path: Sequence[PrefixNode] = ()) -> None:
        """After `drop`: blocks that nobody holds become cached, or free where they cannot be found.

        Args:
            blocks: in order of position.
            path: nodes that were used just now, each the parent of the next; they are behind those of `blocks`.
        """
        for node in reversed(path):
            if not self.holders[node.block]:
                self.cached.setdefault(node, 0)
                self.touch(node)
        self.let_go(reversed(blocks))
        self._budget.trim()

    def publish(self, parent: PrefixNode, tokens: Tokens, block: int) -> PrefixNode:
        """Let a block be found. A leaf that holds the first of these tokens, and no others, has no more use."""
        assert self.nodes[block] is None, f"block {block} can be found as the block of another text"
        shorter = self.trie.shorter(parent, tokens)
        if shorter is not None:
            del self.cached[shorter]
            self.warm.append(self._unlink(shorter))
            self.cool()
            self.windows.cool()
        node = self.nodes[block] = self.trie.insert(parent, tokens, block)
        return node

    def unpublish(self, node: PrefixNode) -> None:
        """A held block can be found no more, and so can none of those that follow it, which nobody holds."""
        below = [*node.children]
        for child in below:
            below.extend(child.children)
        for child in reversed(below):
            del self.cached[child]
            self.warm.append(self._unlink(child))
        self._unlink(node)

    def forget(self, held: Iterable[Iterable[int]]) -> None:
        """Nothing can be found any more; only these blocks of each holder are held, and no other keeps its memory."""
        self.trie = PrefixTree(self.trie.size)
        self.recount(held)

    def _unlink(self, node: PrefixNode) -> int:
        self.states.drop(node)
        self.windows.lose(node)
        self.trie.remove(node)
        self.nodes[node.block] = None
        return node.block
