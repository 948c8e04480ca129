"""How much memory all that is held and kept may take, where a text has blocks of two sizes and recurrent states.

Blocks of the layers that keep the whole text, blocks of sliding layers and states lie in memories of their own. On the
CPU memory that was never written is not taken, so each may have what the others leave. One number bounds them all, in
the largest unit that divides the sizes of both kinds of blocks. Where there is one kind the unit is a block.
"""

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from onward.cache.block_pool import BlockPool
    from onward.cache.blocks import KVBlocks
    from onward.cache.states import StatePool
    from onward.cache.windows import WindowPool


class Prices(NamedTuple):
    """What a thing takes in units. unit: the bytes of one. block: of the layers that keep the whole text. window: of
    the sliding layers. state: a slot of recurrent states."""

    unit: int
    block: int
    window: int
    state: int

    @classmethod
    def of(cls, memory: "KVBlocks") -> "Prices":
        block = memory.block_nbytes
        window = 0 if memory.windows is None else memory.windows.block_nbytes
        unit = math.gcd(block, window)
        return cls(
            unit, block // unit, window // unit, 0 if memory.states is None else -(-memory.states.nbytes // unit)
        )


class Budget:
    """The accounts of all pools of one memory together.

    total: how many units there are. most_cached: how many the blocks may take that nobody holds.
    blocks, windows, states: the pools, which say so when they are made. They are held weakly: their memory goes with
        the slots, and does not wait for the collector.
    clock: counts; says what was used before what.
    """

    def __init__(self, prices: Prices, total: int, most_cached: int) -> None:
        self.prices, self.total, self.most_cached = prices, total, most_cached
        self.clock: Iterator[int] = itertools.count()
        self.blocks: BlockPool
        self.windows: WindowPool
        self.states: StatePool

    @classmethod
    def of(cls, memory: "KVBlocks", most_cached: int, nbytes: int | None) -> "Budget":
        """For so many bytes of a memory; by default for all of it."""
        prices = Prices.of(memory)
        total = memory.count * prices.block
        if memory.windows is not None:
            total += memory.windows.count * prices.window
        if memory.states is not None:
            total += memory.states.count * prices.state
        return cls(prices, total if nbytes is None else min(total, nbytes // prices.unit), most_cached)

    @property
    def cached(self) -> int:
        """Units of what nobody holds and can be found. What lies where a slot has room reserved is not counted."""
        return min(self.available, self._of_blocks() + len(self.states.kept) * self.prices.state)

    @property
    def available(self) -> int:
        """Units that can be had now: what is free or cached, but for what slots may still take of sliding layers."""
        held = self.blocks.held * self.prices.block + self.windows.reserved * self.prices.window
        return self.total - held - (self.states.used - len(self.states.kept)) * self.prices.state

    def make_room(self, price: int) -> None:
        """Evict what was used the longest ago until so many units are free; who asks has seen that there can be."""
        while self._used() + price > self.total and self._evict():
            pass

    def trim(self) -> None:
        """Keep no more blocks that nobody holds than are to be kept, and no more memory of free ones."""
        while self._of_blocks() > self.most_cached:
            self._evict()
        self.blocks.cool()
        self.windows.cool()

    def _evict(self) -> bool:
        pools = [pool for pool in (self.blocks, self.windows) if pool.cached]
        if pools:
            min(pools, key=lambda pool: pool.oldest).evict()
        elif self.states.kept:
            self.states.drop(next(iter(self.states.kept)))
        else:
            return False
        return True

    def _of_blocks(self) -> int:
        return len(self.blocks.cached) * self.prices.block + len(self.windows.cached) * self.prices.window

    def _used(self) -> int:
        """Units that are not free."""
        used = self.blocks.used * self.prices.block + self.windows.used * self.prices.window
        return used + self.states.used * self.prices.state
