"""Slots for a call: its own, or slots shared by all calls of one owner."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onward.cache import KVPool
from onward.cache.budget import BlockCosts
from onward.cache.kinds import is_lazy
from onward.cache.manager import PagedCacheManager
from onward.decoding.cache_manager import CacheManager
from onward.decoding.row_cache import RowCacheManager
from onward.errors import RequestError
from onward.models import Model, NewBlocks, padded_length
from onward.models.model import computation
from onward.native.machine import memory_limit
from onward.ops.heads import BLOCK
from onward.util.process import renew_in_forks

# Every block costs some bytes of accounting, even if it is never used.
MAX_BLOCKS = 2**15

# (model, rows, length) -> slots with room for this many sequences, until the context exits
Lease = Callable[[Model, int, int], AbstractContextManager[CacheManager]]


def slots_for(model: Model, rows: int, length: int) -> CacheManager:
    """Private slots for `rows` sequences of at most `length` positions."""
    if model.new_blocks is None:
        return RowCacheManager.allocate(model, rows, length)
    blocks = model.new_blocks(rows * -(-length // BLOCK))
    return PagedCacheManager(blocks, max_len=_table_length(model, length), cached_blocks=0)


@contextmanager
def private_lease(model: Model, rows: int, length: int) -> Iterator[CacheManager]:
    """A lease of slots that are not shared."""
    yield slots_for(model, rows, length)


def _table_length(model: Model, length: int) -> int:
    """The positions of a block table: the same for every call if possible, so that all calls share programs."""
    return padded_length(length, model) if model.max_seq_len is None else model.max_seq_len


class SharedCache:
    """Slots shared by the calls of one owner, so that common prompt prefixes are processed once.

    memory: the most bytes of keys and values kept between calls; 0 keeps none.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self._shared: _Shared | None = None
        self._lock = threading.RLock()  # the garbage collector may close a stream, ending its lease, in any thread
        renew_in_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has its own slots."""
        return type(self), (self.memory,)

    def renew(self) -> None:
        """In a forked child: a new lock. Leases of the parent's other threads end."""
        self._lock = threading.RLock()
        if self._shared is not None:
            self._shared.promised = 0

    @contextmanager
    def lease(self, model: Model, rows: int, length: int) -> Iterator[CacheManager]:
        """Slots with room for `rows` sequences of at most `length` positions until the lease ends.

        They are private if the shared slots have no room or the model's cache is not paged. Blocks promised to other
        leases count as used, so concurrent calls never take each other's room.
        """
        shared, blocks = None, 0
        if model.new_blocks is not None and self.memory:
            with self._lock:
                shared = self._shared_slots(model, length)
                slots = shared.slots
                blocks = rows * slots.blocks_for(length)
                if blocks <= slots.available - shared.promised and length <= slots.max_len:
                    slots.set_weights_version(computation(model))
                    shared.promised += blocks
                else:
                    shared = None
        if shared is None:
            yield slots_for(model, rows, length)
            return
        try:
            yield slots
        finally:
            with self._lock:
                shared.promised = max(0, shared.promised - blocks)  # a forked child starts at 0

    def _shared_slots(self, model: Model, length: int) -> "_Shared":
        if self._shared is None or self._shared.model() is not model:
            assert model.new_blocks is not None, "checked by the caller"
            # On the CPU, memory that is never written is never allocated, so the limit may be all of the machine's.
            limit = memory_limit()
            limit = limit if is_lazy(limit, model.device) else self.memory
            blocks = blocks_within(model.new_blocks, limit, MAX_BLOCKS, model.device)
            slots = PagedCacheManager(
                blocks,
                max_len=_table_length(model, length),
                cached_blocks=min(self.memory, limit) // BlockCosts.of(blocks).unit,
                nbytes=limit,
            )
            self._shared = _Shared(slots, weakref.ref(model))
        return self._shared


@dataclass(eq=False)
class _Shared:
    """The shared slots of a model. promised: the number of blocks that leases may take."""

    slots: PagedCacheManager
    model: "weakref.ref[Model]"
    promised: int = 0


def blocks_within(new_blocks: NewBlocks, nbytes: int, max_blocks: int, device: torch.device) -> KVPool:
    """Allocate as many blocks as `nbytes` hold, at least one and at most `max_blocks` of each kind.

    On the CPU, where unwritten memory takes no space, each kind may use all of it, since the budget bounds them
    together. Elsewhere both kinds have equally many. If the system refuses the allocation, it is halved.
    """
    one = new_blocks(1)
    whole, window = one.block_nbytes, 0 if one.windows is None else one.windows.block_nbytes
    if device.type != "cpu":
        whole = window = whole + window
    count, windows = (max(1, min(nbytes // each, max_blocks)) if each else max_blocks for each in (whole, window))
    while max(count, windows) > 1:
        try:
            return new_blocks(count) if one.windows is None else new_blocks(count, windows)
        except RequestError:
            count, windows = -(-count // 2), -(-windows // 2)
    return one
