"""Which slots a call gets: its own, or those that the calls of one owner share."""

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
from onward.ops.kv_write import BLOCK
from onward.util.process import renew_in_forks

# The most blocks of a memory. Each costs some bytes of accounts, also one that is never used.
MOST_BLOCKS = 2**15


# (model, rows, length) -> slots that have room for so many sequences, for as long as the context lasts
Lease = Callable[[Model, int, int], AbstractContextManager[CacheManager]]


def slots_for(model: Model, rows: int, length: int) -> CacheManager:
    """Slots of one's own for `rows` sequences of at most `length` positions."""
    if model.new_blocks is None:
        return RowCacheManager.of(model, rows, length)
    return PagedCacheManager(
        model.new_blocks(rows * -(-length // BLOCK)), max_len=longest_text(model, length), cached_blocks=0
    )


@contextmanager
def lease_of_own(model: Model, rows: int, length: int) -> Iterator[CacheManager]:
    """A lease of slots that nobody shares."""
    yield slots_for(model, rows, length)


def longest_text(model: Model, length: int) -> int:
    """How many positions a table of blocks has room for: as many for every call, so that all calls share programs."""
    return padded_length(length, model) if model.max_seq_len is None else model.max_seq_len


class SharedCache:
    """The slots that the calls of one owner share, so that prompts which begin alike are not processed twice.

    memory: the most bytes of keys and values that are kept between calls; 0 keeps none.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self._shared: _Shared | None = None
        self._lock = threading.RLock()  # a stream that the collector closes ends its lease in any thread, at any time
        renew_in_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has slots of its own."""
        return type(self), (self.memory,)

    def renew(self) -> None:
        """In a forked child: a new lock. Leases of the parent's other threads end with their promises."""
        self._lock = threading.RLock()
        if self._shared is not None:
            self._shared.promised = 0

    @contextmanager
    def lease(self, model: Model, rows: int, length: int) -> Iterator[CacheManager]:
        """Slots with room for `rows` sequences of at most `length` positions until the lease ends.

        Where the shared ones have no room for them, or the model's cache is not in blocks, they are the call's own.
        What another lease was promised counts as taken, so calls of several threads never take each other's room.
        """
        if model.new_blocks is None or not self.memory:
            yield slots_for(model, rows, length)
            return
        with self._lock:
            shared = self._shared_by_calls_of(model, length)
            slots = shared.slots
            blocks = rows * slots.blocks_for(length)
            fits = blocks <= slots.available - shared.promised and length <= slots.max_len
            if fits:
                slots.set_weights_version(computation(model))
                shared.promised += blocks
        if not fits:
            yield slots_for(model, rows, length)
            return
        try:
            yield slots
        finally:
            with self._lock:
                shared.promised = max(0, shared.promised - blocks)  # a forked child starts at 0

    def _shared_by_calls_of(self, model: Model, length: int) -> "_Shared":
        if self._shared is None or self._shared.model() is not model:
            assert model.new_blocks is not None, "asked before"
            # Memory that is never written is never allocated on the CPU, so all of the machine's may be asked for.
            limit = memory_limit()
            limit = limit if is_lazy(limit, model.device) else self.memory
            blocks = blocks_within(model.new_blocks, limit, MOST_BLOCKS, model.device)
            slots = PagedCacheManager(
                blocks,
                max_len=longest_text(model, length),
                cached_blocks=min(self.memory, limit) // BlockCosts.of(blocks).unit,
                nbytes=limit,
            )
            self._shared = _Shared(slots, weakref.ref(model))
        return self._shared


@dataclass(eq=False)
class _Shared:
    """The slots that calls of a model share. promised: how many blocks leases may take."""

    slots: PagedCacheManager
    model: "weakref.ref[Model]"
    promised: int = 0


def blocks_within(new_blocks: NewBlocks, nbytes: int, most: int, device: torch.device) -> KVPool:
    """Memory of at most so many bytes, and of at most `most` blocks of each kind, one at least.

    On the CPU, where memory that is not written is not taken, each kind may have all of it, since slots bound them
    together. Elsewhere both kinds have equally many. Where the system refuses so much, for a process may be limited, it
    is less.
    """
    one = new_blocks(1)
    whole, window = one.block_nbytes, 0 if one.windows is None else one.windows.block_nbytes
    if device.type != "cpu":
        whole = window = whole + window
    count, windows = (max(1, min(nbytes // each, most)) if each else most for each in (whole, window))
    while max(count, windows) > 1:
        try:
            return new_blocks(count) if one.windows is None else new_blocks(count, windows)
        except RequestError:
            count, windows = -(-count // 2), -(-windows // 2)
    return one
