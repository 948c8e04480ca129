"""Blocks and their holders: which are free, which somebody holds, and which are kept because they can be found.

A block is free, held by one slot or several, or cached: nobody holds it, but its text can be found. Whoever holds a
block that can be found holds its parent in the trie too. So what nobody holds can always be evicted, leaves first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from onward.cache.block_trie import BlockNode, BlockTrie, Tokens
from onward.cache.states import StateMemory, StatePool


class BlockMemory(Protocol):
    """Memory for `count` blocks of keys and values, numbered from 0.

    Block number `count` is spare: it holds nothing, and padding may write there. states: the memory of recurrent
    layers; None without such.
    """

    @property
    def count(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def states(self) -> StateMemory | None: ...

    def view(self, table: Tensor, rows: Tensor = ..., /) -> Any:
        """The cache that a forward gets. table: int32 [B, M], the block of each row's m-th run of positions. rows:
        int32 [B], the slot of each row's states, where there are such."""
        ...

    def copy(self, source: int, to: int, positions: int) -> None:
        """Copy the first `positions` positions of block `source` to block `to`, all layers."""
        ...

    def read(self, blocks: Sequence[int], positions: int, state: int | None, /) -> Any:
        """The first positions of a row that lies in these blocks, and what its slot of states holds, if it has one, as
        a dense cache of one row of its own."""
        ...

    def write(self, blocks: Sequence[int], cache: Any, positions: int, state: int | None, /) -> None:
        """Copy the first positions of a dense cache of one row into these blocks, and its states into their slot."""
        ...

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return to the system the memory of blocks that hold nothing."""
        ...


class BlockPool:
    """Counts of blocks, and the order in which they are evicted.

    Args:
        size: positions of a block.
        cached_blocks: the most blocks that are kept though nobody holds them.
        warm_blocks: how many free blocks keep their memory, so that short texts one after another do not give it back
            and fault it in again each; up to twice as many do, since memory is given back in batches.

    states: who has recurrent states; those of a node go with its block.
    holders: how many hold each block. nodes: its node in the trie, if it can be found.
    """

    def __init__(self, memory: BlockMemory, size: int, cached_blocks: int, warm_blocks: int, states: StatePool) -> None:
        self._memory = memory
        self.states = states
        self.trie = BlockTrie(size)
        self.cached_blocks, self.warm_blocks = cached_blocks, warm_blocks
        self.holders = [0] * memory.count
        self.nodes: list[BlockNode | None] = [None] * memory.count
        # Least recently used first; what is let go with or after a child comes behind it, so the first is a leaf.
        self.cached: OrderedDict[BlockNode, None] = OrderedDict()
        self.warm: list[int] = []
        self.cold = list(range(memory.count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self.warm) + len(self.cold)

    @property
    def available(self) -> int:
        """How many blocks `take` can give."""
        return len(self.warm) + len(self.cold) + len(self.cached)

    def take(self) -> int:
        """A block of the caller's own: a free one, or else the least recently used of the cached ones."""
        block = self.warm.pop() if self.warm else self.cold.pop() if self.cold else self._evict()
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
        """One holder less; `settle` says what becomes of blocks that have none."""
        for block in blocks:
            self.holders[block] -= 1

    def settle(self, blocks: Sequence[int], path: Sequence[BlockNode] = ()) -> None:
        """After `drop`: blocks that nobody holds become cached, or free where they cannot be found.

        Args:
            blocks: in order of position.
            path: nodes that were used just now, each the parent of the next; they are behind those of `blocks`.
        """
        for node in reversed(path):
            if not self.holders[node.block]:
                self.cached[node] = None
                self.cached.move_to_end(node)
        for block in reversed(blocks):
            own = self.nodes[block]
            if self.holders[block]:
                continue
            if own is None:
                self.warm.append(block)
            else:
                self.cached.setdefault(own)
        while len(self.cached) > self.cached_blocks:
            self.warm.append(self._evict())
        self._cool()

    def touch(self, node: BlockNode) -> None:
        """The node was used just now; those above it are held."""
        if node in self.cached:
            self.cached.move_to_end(node)

    def publish(self, parent: BlockNode, tokens: Tokens, block: int) -> BlockNode:
        """Let a block be found. A leaf that holds the first of these tokens, and no others, has no more use."""
        assert self.nodes[block] is None, f"block {block} can be found as the block of another text"
        shorter = self.trie.shorter(parent, tokens)
        if shorter is not None:
            del self.cached[shorter]
            self.warm.append(self._unlink(shorter))
            self._cool()
        node = self.nodes[block] = self.trie.insert(parent, tokens, block)
        return node

    def unpublish(self, leaf: BlockNode) -> None:
        """A held block can be found no more."""
        self._unlink(leaf)

    def forget(self, held: Iterable[Sequence[int]]) -> None:
        """Nothing can be found any more; only these blocks of each holder are held, and no other keeps its memory."""
        count = len(self.holders)
        self.trie = BlockTrie(self.trie.size)
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

    def _evict(self) -> int:
        node, _ = self.cached.popitem(last=False)
        return self._unlink(node)

    def _unlink(self, node: BlockNode) -> int:
        self.states.drop(node)
        self.trie.remove(node)
        self.nodes[node.block] = None
        return node.block

    def _cool(self) -> None:
        """Give memory back once twice as many free blocks keep theirs as are to."""
        if len(self.warm) > 2 * self.warm_blocks:
            self._give_back(self.warm_blocks)

    def _give_back(self, warm: int) -> None:
        """Keep the memory of the `warm` free blocks that were used last; the others return theirs."""
        cooled = sorted(self.warm[: len(self.warm) - warm])
        if cooled:
            self._memory.give_back(cooled)
            del self.warm[: len(cooled)]
            self.cold.extend(reversed(cooled))
