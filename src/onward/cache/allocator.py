"""Full-attention blocks: which are free, held, and cached in the prefix index."""

import weakref
from collections.abc import Iterable, Sequence

from onward.cache.budget import BlockAccounts, CacheBudget
from onward.cache.paged import KVPool
from onward.cache.prefix_index import PrefixNode, PrefixTree, Tokens
from onward.cache.states import StatePool


class BlockPool(BlockAccounts):
    """The full-attention blocks, with the trie that finds them.

    Cached blocks are always whole branches, and a block is released with or after its children. So the first cached
    node is a leaf. The sliding-window block and recurrent states of a node are freed with its block.

    size: positions of a block.
    """

    def __init__(
        self,
        memory: KVPool,
        size: int,
        warm_blocks: int,
        budget: CacheBudget,
        windows: BlockAccounts,
        states: StatePool,
    ) -> None:
        super().__init__(memory, budget.prices.block, warm_blocks, budget)
        self.windows, self.states = windows, states
        self.trie = PrefixTree(size)
        budget.blocks = weakref.proxy(self)

    def settle(self, blocks: Sequence[int], path: Sequence[PrefixNode] = ()) -> None:
        """`let_go` of blocks, in order of position, and `touch` the nodes of a path."""
        for node in reversed(path):
            if not self.holders[node.block]:
                self.cached.setdefault(node, 0)
                self.touch(node)
        self.let_go(reversed(blocks))
        self._budget.trim()

    def publish(self, parent: PrefixNode, tokens: Tokens, block: int) -> PrefixNode:
        """Add a block to the prefix index. It replaces a leaf that holds a proper prefix of its tokens."""
        assert self.nodes[block] is None, f"block {block} is already in the prefix index"
        shorter = self.trie.shorter(parent, tokens)
        if shorter is not None:
            del self.cached[shorter]
            self.warm.append(self._unlink(shorter))
            self.cool()
            self.windows.cool()
        node = self.nodes[block] = self.trie.insert(parent, tokens, block)
        return node

    def unpublish(self, node: PrefixNode) -> None:
        """Remove a held block from the prefix index, with its descendants, none of which is held."""
        below = [*node.children]
        for child in below:
            below.extend(child.children)
        for child in reversed(below):
            del self.cached[child]
            self.warm.append(self._unlink(child))
        self._unlink(node)

    def forget(self, held: Iterable[Iterable[int]]) -> None:
        self.trie = PrefixTree(self.trie.size)
        self.recount(held)

    def lose(self, node: PrefixNode) -> None:
        self.windows.lose(node)

    def _unlink(self, node: PrefixNode) -> int:
        self.states.drop(node)
        self.lose(node)
        self.trie.remove(node)
        self.nodes[node.block] = None
        return node.block
