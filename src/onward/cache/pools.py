"""The pools of one memory, and how much of them a text takes.

Room is counted in blocks. Where there are sliding layers or recurrent states a block is a unit of memory, and a text
takes as many as all that it holds is worth (`onward.cache.budget`).
"""

from collections.abc import Sequence

from onward.cache.block_pool import BlockPool
from onward.cache.block_trie import Match
from onward.cache.blocks import KVBlocks
from onward.cache.budget import Budget
from onward.cache.slot import Slot
from onward.cache.states import StatePool
from onward.cache.windows import WindowPool


class Pools:
    """Blocks of the layers that keep the whole text, those of sliding layers, and recurrent states.

    Args:
        block: positions of a block.
        cached_blocks: the most blocks kept that nobody holds.
        warm_blocks: how many free blocks of each kind keep their memory.
        nbytes: the most memory that all together take; by default as much as there is.
    """

    def __init__(self, memory: KVBlocks, block: int, cached_blocks: int, warm_blocks: int, nbytes: int | None) -> None:
        if memory.states is not None:
            cached_blocks = -(-cached_blocks // 2)  # their states may take as much
        self.block = block
        self.budget = Budget.of(memory, cached_blocks, nbytes)
        self.states = StatePool(memory.states, cached_blocks, self.budget)
        self.windows = WindowPool(memory.windows, block, warm_blocks, self.budget)
        self.blocks = BlockPool(memory, block, warm_blocks, self.budget, self.windows, self.states)

    def count(self, length: int) -> int:
        """How many blocks hold `length` positions of the layers that keep all."""
        return -(-length // self.block)

    def price(self, length: int) -> int:
        """What a slot of `length` positions takes in all."""
        prices, count = self.budget.prices, self.count(length)
        return count * prices.block + self.windows.most(count) * prices.window + prices.state

    def price_of(self, slots: Sequence[Slot]) -> int:
        """What these slots hold together."""
        prices = self.budget.prices
        blocks = len({block for slot in slots for block in slot.blocks}) * prices.block
        return blocks + sum(slot.most_windows * prices.window + prices.state for slot in slots)

    def can_hold(self, length: int) -> bool:
        """Whether `length` positions could ever be reserved: with no other slot there."""
        count, windows = self.count(length), self.windows
        there_are = count <= len(self.blocks.holders) and windows.most(count) <= len(windows.holders)
        return there_are and self.price(length) <= self.budget.total

    @property
    def longest(self) -> int:
        """The positions of the longest text that all blocks together hold."""
        prices, total, count = self.budget.prices, self.budget.total, len(self.blocks.holders)
        while count and self.price(count * self.block) > total:
            count -= max(1, (self.price(count * self.block) - total) // (prices.block + prices.window))
        return count * self.block

    def fit(self, blocks: int, windows: int, states: int) -> bool:
        """Whether so many more of each can be had now."""
        if blocks > self.blocks.available or not self.windows.can_reserve(windows):
            return False
        if states and self.states.is_full:
            return False
        prices = self.budget.prices
        return blocks * prices.block + windows * prices.window + states * prices.state <= self.budget.available

    def fit_after(self, match: Match, count: int) -> bool:
        """Whether a slot of so many blocks can be had now that begins with a match."""
        # What is only cached now will be held, and one more window block as long as it is copied from.
        cached = sum(not self.blocks.holders[node.block] for node in match.path)
        copied = match.partial is not None and match.partial.window is not None
        return self.fit(count - len(match.path) + cached, self.windows.most(count) + copied, 1)
