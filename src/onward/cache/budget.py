"""One memory budget for full-attention blocks, sliding-window blocks and recurrent states.

Each kind has a pool of its own. On the CPU, memory that was never written takes no space, so each pool may use what the
others leave. One number bounds them all, in the largest unit that divides both block sizes; with a single kind of block
the unit is a block.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from onward.cache.paged import KVPool
from onward.cache.prefix_index import PrefixNode


class AccountedBlocks(Protocol):
    """A pool of blocks, as far as the budget and the states know it: `onward.cache.allocator.BlockAccounts`."""

    @property
    def nodes(self) -> Sequence[PrefixNode | None]: ...

    @property
    def cached(self) -> Collection[PrefixNode]: ...

    @property
    def used(self) -> int: ...

    @property
    def held(self) -> int: ...

    @property
    def oldest(self) -> int: ...

    def evict(self) -> None: ...

    def cool(self) -> None: ...


class AccountedWindows(AccountedBlocks, Protocol):
    """`onward.cache.windows.WindowPool`."""

    @property
    def reserved(self) -> int: ...


class AccountedStates(Protocol):
    """`onward.cache.states.StatePool`."""

    @property
    def kept(self) -> Collection[PrefixNode]: ...

    @property
    def used(self) -> int: ...

    def drop(self, node: PrefixNode) -> None: ...


class BlockCosts(NamedTuple):
    """What a thing takes in units. unit: the bytes of one. block: of the layers that keep the whole text. window: of
    the sliding layers. state: a slot of recurrent states."""

    unit: int
    block: int
    window: int
    state: int

    @classmethod
    def of(cls, memory: KVPool) -> "BlockCosts":
        block = memory.block_nbytes
        window = 0 if memory.windows is None else memory.windows.block_nbytes
        unit = math.gcd(block, window)
        return cls(
            unit, block // unit, window // unit, 0 if memory.states is None else -(-memory.states.nbytes // unit)
        )


class CacheBudget:
    """The accounts of all pools of one memory together.

    total: how many units there are. max_cached: how many the blocks may take that nobody holds.
    blocks, windows, states: the pools, which say so when they are made. They are held weakly: their memory goes with
        the slots, and does not wait for the collector.
    clock: counts; says what was used before what.
    """

    def __init__(self, prices: BlockCosts, total: int, max_cached: int) -> None:
        self.prices, self.total, self.max_cached = prices, total, max_cached
        self.clock: Iterator[int] = itertools.count()
        self.blocks: AccountedBlocks
        self.windows: AccountedWindows
        self.states: AccountedStates

    @classmethod
    def of(cls, memory: KVPool, max_cached: int, nbytes: int | None) -> "CacheBudget":
        """For so many bytes of a memory; by default for all of it."""
        prices = BlockCosts.of(memory)
        total = memory.count * prices.block
        if memory.windows is not None:
            total += memory.windows.count * prices.window
        if memory.states is not None:
            total += memory.states.count * prices.state
        return cls(prices, total if nbytes is None else min(total, nbytes // prices.unit), max_cached)

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
        while self._of_blocks() > self.max_cached:
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
