"""The pools of one memory, and the prefix index over them.

Capacity is counted in blocks. With sliding layers or recurrent states, a block is a unit of memory, and a sequence
takes the worth of everything it holds (`onward.cache.budget`).
"""

from collections.abc import Sequence

from onward.cache.allocator import BlockPool
from onward.cache.budget import CacheBudget
from onward.cache.paged import KVPool
from onward.cache.prefix_index import NO_MATCH, PrefixMatch, PrefixNode
from onward.cache.slot import AdapterRef, Slot, digest_of
from onward.cache.states import StatePool
from onward.cache.windows import WindowPool


class Pools:
    """Full-attention blocks, sliding-window blocks and recurrent states; the arguments are `PagedCacheManager`'s."""

    def __init__(self, memory: KVPool, block: int, cached_blocks: int, warm_blocks: int, nbytes: int | None) -> None:
        if memory.states is not None:
            cached_blocks = -(-cached_blocks // 2)  # their states may take as much
        self.block = block
        self.budget = CacheBudget.of(memory, cached_blocks, nbytes)
        self.states = StatePool(memory.states, cached_blocks, self.budget)
        self.windows = WindowPool(memory.windows, block, warm_blocks, self.budget)
        self.blocks = BlockPool(memory, block, warm_blocks, self.budget, self.windows, self.states)

    def count(self, length: int) -> int:
        """The number of full-attention blocks for `length` positions."""
        return -(-length // self.block)

    def price(self, length: int) -> int:
        """The cost of a slot of `length` positions."""
        prices, count = self.budget.prices, self.count(length)
        return count * prices.block + self.windows.most(count) * prices.window + prices.state

    def price_of(self, slots: Sequence[Slot]) -> int:
        """The cost of these slots together."""
        prices = self.budget.prices
        blocks = len({block for slot in slots for block in slot.blocks}) * prices.block
        return blocks + sum(slot.max_windows * prices.window + prices.state for slot in slots)

    def can_hold(self, length: int) -> bool:
        """Whether `length` positions could be reserved without any other slot."""
        count, windows = self.count(length), self.windows
        exist = count <= len(self.blocks.holders) and windows.most(count) <= len(windows.holders)
        return exist and self.price(length) <= self.budget.total

    @property
    def longest(self) -> int:
        """The positions of the longest sequence that all blocks together hold."""
        prices, total, count = self.budget.prices, self.budget.total, len(self.blocks.holders)
        while count and self.price(count * self.block) > total:
            count -= max(1, (self.price(count * self.block) - total) // (prices.block + prices.window))
        return count * self.block

    def fit(self, blocks: int, windows: int, states: int) -> bool:
        """Whether this many more of each can be allocated now."""
        if blocks > self.blocks.available or not self.windows.can_reserve(windows):
            return False
        if states and self.states.is_full:
            return False
        prices = self.budget.prices
        return blocks * prices.block + windows * prices.window + states * prices.state <= self.budget.available

    def fit_after(self, match: PrefixMatch, count: int) -> bool:
        """Whether a slot of `count` blocks that begins with a match can be allocated now."""
        # Blocks that are only cached now will be held, and one more window block while it is copied from.
        cached = sum(not self.blocks.holders[node.block] for node in match.path)
        copied = match.partial is not None and match.partial.window is not None
        return self.fit(count - len(match.path) + cached, self.windows.most(count) + copied, 1)


class PrefixIndex:
    """The blocks that can be reused, with the sliding-window blocks and recurrent states of their nodes."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def match(
        self, ids: Sequence[int], limit: int, adapter: AdapterRef | None
    ) -> tuple[PrefixMatch, PrefixNode | None]:
        """The longest reusable prefix of ids[:limit], and the node with the recurrent states after it, if any."""
        if limit <= 0:
            return self.reusable(NO_MATCH)
        return self.reusable(self._pools.blocks.trie.match(ids, limit, digest_of(adapter)))

    def branch(self, ids: Sequence[int], limit: int, adapter: AdapterRef | None) -> int:
        """The end of the last full block found for ids[:limit], with or without states; 0 without recurrent layers."""
        if self._pools.states.memory is None or limit <= 0:
            return 0
        return len(self._found(ids, limit, adapter)) * self._pools.block

    def _found(self, ids: Sequence[int], limit: int, adapter: AdapterRef | None) -> list[PrefixNode]:
        return self._pools.blocks.trie.match(ids, limit, digest_of(adapter)).path

    def reusable(self, match: PrefixMatch) -> tuple[PrefixMatch, PrefixNode | None]:
        """The longest part of a match whose window and recurrent states are cached, and the node of the states."""
        while True:
            seen = self._pools.windows.reusable(match)
            match, kept = self._pools.states.reusable(seen, self._pools.block)
            if match == seen:
                return match, kept

    def nodes(self, slot: Slot) -> list[PrefixNode | None]:
        """The nodes of the slot's noted blocks."""
        return [self._pools.blocks.nodes[block] for block in slot.blocks[: slot.noted]]

    def last_noted(self, slot: Slot) -> PrefixNode:
        """The node of the slot's last noted block, or else its adapter's root."""
        pool = self._pools.blocks
        node = pool.nodes[slot.blocks[slot.noted - 1]] if slot.noted else pool.trie.root(digest_of(slot.adapter))
        assert node is not None, "a slot's noted blocks are in the prefix index"
        return node

    def note(self, slot: Slot, ids: Sequence[int]) -> None:
        """Add the slot's full blocks to the prefix index; `ids` are final."""
        assert len(ids) <= slot.length, (len(ids), slot.length)
        pool, size, full = self._pools.blocks, self._pools.block, len(ids) // self._pools.block
        while slot.noted < len(slot.blocks) and pool.nodes[slot.blocks[slot.noted]] is not None:
            slot.noted += 1  # by a slot that shares the block
        parent = self.last_noted(slot)
        while slot.noted < full:
            tokens = tuple(ids[slot.noted * size : (slot.noted + 1) * size])
            if pool.trie.starting_with(parent, tokens) is not None:
                break
            parent = pool.publish(parent, tokens, slot.blocks[slot.noted])
            self._pools.windows.publish(slot, slot.noted, parent)
            slot.noted += 1
        slot.sealed = max(slot.sealed, full)
        slot.note_at = (full + 1) * size
        self._keep_states(slot, ids, full)

    def _keep_states(self, slot: Slot, ids: Sequence[int], full: int) -> None:
        """Cache the recurrent states after the slot's last full block, if available, at that block's node or another
        one with the same tokens."""
        states, end = self._pools.states, full * self._pools.block
        if slot.state is None or not full or not states.holds(slot.state, end):
            return
        path = [self.last_noted(slot)] if slot.noted == full else self._found(ids, end, slot.adapter)[full - 1 :]
        if path and path[0].state is None:
            states.snapshot(path[0], slot.state, end)

    def leave(self, slot: Slot, ids: Sequence[int]) -> list[PrefixNode]:
        """Add the blocks after the noted ones to the prefix index, unless a slot holds them. Returns the nodes of these
        ids, which may have other blocks with the same tokens."""
        pool, size = self._pools.blocks, self._pools.block
        parent, path = self.last_noted(slot), []
        for index in range(slot.noted, self._pools.count(len(ids))):
            tokens = tuple(ids[index * size : (index + 1) * size])
            node = pool.trie.starting_with(parent, tokens)
            if node is None:
                if pool.holders[slot.blocks[index]]:  # its holder does not hold the parent
                    break
                node = pool.publish(parent, tokens, slot.blocks[index])
            if len(node.tokens) == len(tokens):  # else the node's block holds more than the slot's
                self._pools.windows.publish(slot, index, node)
            path.append(node)
            parent = node
        return path

    def leave_states(self, slot: Slot, count: int, path: list[PrefixNode]) -> None:
        """Cache the slot's recurrent states at the node of the last of `count` positions, or free them. path: the nodes
        after the noted ones."""
        states = self._pools.states
        is_found = slot.findable and count > 0 and slot.noted + len(path) == self._pools.count(count)
        if slot.state is None or not (is_found and states.max_kept and states.holds(slot.state, count)):
            states.give_back(slot.state)
            return
        states.keep(path[-1] if path else self.last_noted(slot), slot.state, count)
