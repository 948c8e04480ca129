"""One memory budget for full-attention blocks, sliding-window blocks and recurrent states.

Each kind has a pool of its own. On the CPU, memory that was never written takes no space, so each pool may use what the
others leave. One number bounds them all, in the largest unit that divides both block sizes; with a single kind of block
the unit is a block.

A block is free, held by one or more slots, or cached: no slot holds it, but the prefix index can find it. A slot that
holds a block of the prefix index also holds its parent. So cached blocks can always be evicted, leaves first.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, Protocol

from onward.cache.paged import KVPool, LayerPool
from onward.cache.prefix_index import PrefixNode


class BlockAccounts(ABC):
    """Which blocks of a pool are free, held and cached.

    price: of a block, in units of the budget. warm_blocks: how many free blocks keep their memory, so that consecutive
    short requests do not return it and fault it in again; up to twice as many do, since memory is returned in batches.

    holders: the number of holders of each block. nodes: its node in the prefix index, if any. reserved: how many
    blocks slots may have, counted for sliding windows only. cached: nodes whose block has no holder, with the time of
    last use; the oldest first.
    """

    def __init__(self, memory: LayerPool | None, price: int, warm_blocks: int, budget: "CacheBudget") -> None:
        count = 0 if memory is None else memory.count
        self.price, self.warm_blocks = price, warm_blocks
        self.holders = [0] * count
        self.nodes: list[PrefixNode | None] = [None] * count
        self.cached: OrderedDict[PrefixNode, int] = OrderedDict()
        self.reserved = 0
        self.warm: list[int] = []
        self.cold = list(range(count - 1, -1, -1))
        self._pool, self._budget = memory, budget

    @property
    def free(self) -> int:
        return len(self.warm) + len(self.cold)

    @property
    def available(self) -> int:
        """The number of blocks that `take` can allocate, budget aside."""
        return len(self.warm) + len(self.cold) + len(self.cached)

    @property
    def used(self) -> int:
        """The number of blocks that are held or cached."""
        return len(self.holders) - len(self.warm) - len(self.cold)

    @property
    def held(self) -> int:
        return self.used - len(self.cached)

    @property
    def oldest(self) -> int:
        """When the next block to be evicted was last used."""
        return next(iter(self.cached.values()))

    def take(self) -> int:
        """Allocate a free block, or else the least recently used cached one."""
        self._budget.make_room(self.price)
        if not self.free:
            self.evict()
        block = self.warm.pop() if self.warm else self.cold.pop()
        self.holders[block] = 1
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that are held or cached."""
        for block in blocks:
            if not self.holders[block]:
                node = self.nodes[block]
                assert node is not None, f"block {block} is free: it has no holder and no node"
                del self.cached[node]
            self.holders[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Remove a holder from blocks; call `let_go` afterwards."""
        for block in blocks:
            self.holders[block] -= 1

    def let_go(self, blocks: Iterable[int]) -> None:
        """Make blocks without holders cached, or free if they have no node. The first ones are evicted first."""
        for block in blocks:
            own = self.nodes[block]
            if self.holders[block]:
                continue
            if own is None:
                self.warm.append(block)
            elif own not in self.cached:
                self.cached[own] = next(self._budget.clock)

    def touch(self, node: PrefixNode) -> None:
        """Mark the cached block of a node as just used."""
        if node in self.cached:
            self.cached[node] = next(self._budget.clock)
            self.cached.move_to_end(node)

    def evict(self) -> None:
        """Free the least recently used cached block."""
        node, _ = self.cached.popitem(last=False)
        self.warm.append(self._unlink(node))

    def cool(self) -> None:
        """Return the memory of free blocks if too many keep it."""
        if len(self.warm) > 2 * self.warm_blocks:
            self._give_back(self.warm_blocks)

    def recount(self, held: Iterable[Iterable[int]]) -> None:
        """Empty the cache: only each holder's blocks are held, and no other block keeps its memory."""
        count = len(self.holders)
        self.cached.clear()
        self.nodes[:] = [None] * count
        self.holders[:] = [0] * count
        for block in itertools.chain.from_iterable(held):
            self.holders[block] += 1
        cold = set(self.cold)
        self.warm[:] = [block for block in range(count) if not self.holders[block] and block not in cold]
        self.cold[:] = [block for block in range(count - 1, -1, -1) if not self.holders[block] and block in cold]
        self._give_back(0)

    @abstractmethod
    def lose(self, node: PrefixNode) -> None:
        """Free the node's sliding-window block, if any."""

    @abstractmethod
    def _unlink(self, node: PrefixNode) -> int:
        """Remove a node's block from the prefix index, and return it."""

    def _give_back(self, warm: int) -> None:
        """Return the memory of all free blocks but the `warm` last used ones."""
        cooled = sorted(self.warm[: len(self.warm) - warm])
        if cooled and self._pool is not None:
            self._pool.give_back(cooled)
            del self.warm[: len(cooled)]
            self.cold.extend(reversed(cooled))


class AccountedStates(Protocol):
    """`onward.cache.states.StatePool`."""

    @property
    def kept(self) -> Collection[PrefixNode]: ...

    @property
    def used(self) -> int: ...

    def drop(self, node: PrefixNode) -> None: ...


class BlockCosts(NamedTuple):
    """Costs in units. unit: its bytes. block: a full-attention block. window: a sliding-window block. state: a slot of
    recurrent states."""

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
    """The accounts of all pools together.

    total: the number of units. max_cached: the most units of cached blocks.
    blocks, windows, states: the pools, which register themselves. The references are weak, so that their memory is
        freed with the slots instead of by the garbage collector.
    clock: counts uses.
    """

    def __init__(self, prices: BlockCosts, total: int, max_cached: int) -> None:
        self.prices, self.total, self.max_cached = prices, total, max_cached
        self.clock: Iterator[int] = itertools.count()
        self.blocks: BlockAccounts
        self.windows: BlockAccounts
        self.states: AccountedStates

    @classmethod
    def of(cls, memory: KVPool, max_cached: int, nbytes: int | None) -> "CacheBudget":
        """A budget of `nbytes` bytes of a memory, by default all of it."""
        prices = BlockCosts.of(memory)
        total = memory.count * prices.block
        if memory.windows is not None:
            total += memory.windows.count * prices.window
        if memory.states is not None:
            total += memory.states.count * prices.state
        return cls(prices, total if nbytes is None else min(total, nbytes // prices.unit), max_cached)

    @property
    def cached(self) -> int:
        """Units that are cached, without those in room reserved by a slot."""
        return min(self.available, self._cached_blocks + len(self.states.kept) * self.prices.state)

    @property
    def available(self) -> int:
        """Units that can be allocated now: free or cached, and not reserved for sliding windows."""
        held = self.blocks.held * self.prices.block + self.windows.reserved * self.prices.window
        return self.total - held - (self.states.used - len(self.states.kept)) * self.prices.state

    def make_room(self, price: int) -> None:
        """Evict the least recently used entries until `price` units are free; the caller has checked that it fits."""
        while self._used + price > self.total and self._evict():
            pass

    def trim(self) -> None:
        """Limit the cached blocks, and the memory of free ones."""
        while self._cached_blocks > self.max_cached:
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

    @property
    def _cached_blocks(self) -> int:
        return len(self.blocks.cached) * self.prices.block + len(self.windows.cached) * self.prices.window

    @property
    def _used(self) -> int:
        used = self.blocks.used * self.prices.block + self.windows.used * self.prices.window
        return used + self.states.used * self.prices.state
