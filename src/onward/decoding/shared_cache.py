"""Slots for a call: its own, or slots shared by all calls of one owner; what a session keeps in them; and those of an
engine."""

import sys
import threading
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from onward.cache import AdapterRef, KVPool
from onward.cache.disk import CurrentStore
from onward.cache.manager import PagedCacheManager
from onward.cache.plan import is_lazy, total_memory
from onward.decoding.cache_manager import CacheManager, Slot
from onward.decoding.row_cache import RowCacheManager, dims_of
from onward.decoding.sequence import Sequence
from onward.errors import ContextOverflowError, OptionError, RequestError
from onward.models import Cache, Model, NewBlocks, padded_length
from onward.models.model import WeightsVersion, computation
from onward.native.machine import memory_limit
from onward.ops.heads import BLOCK
from onward.util.checks import check_whole
from onward.util.process import renew_in_forks, sigint_deferred
from onward.util.text import in_bytes

# Every block costs some bytes of accounting, even if it is never used.
MAX_BLOCKS = 2**15
# The largest share of a device's memory that the cache of an engine takes by default.
_MAX_MEMORY_SHARE = 0.25
# Positions per sequence of an engine for models without a max_seq_len.
_DEFAULT_CONTEXT = 4096
# (model, its `computation`) -> the store of its prefixes, if it has one now
StoreOf = Callable[[Model, object], CurrentStore | None]
# The positions of a block table of a model without a limit, at least.
_MIN_TABLE = 2**15


def slots_for(model: Model, rows: int, length: int) -> CacheManager:
    """Private slots for `rows` sequences of at most `length` positions."""
    if model.new_blocks is None:
        return RowCacheManager.allocate(model, rows, length)
    blocks = model.new_blocks(rows * -(-length // BLOCK))
    return PagedCacheManager(blocks, max_len=_table_length(model, length), cached_blocks=0)


def bounded_slots(model: Model, rows: int, length: int, positions: int) -> CacheManager:
    """Private slots for at most `rows` sequences of at most `length` positions, and about `positions` of all together:
    fewer if the system refuses the memory. Released slots stay cached."""
    if model.new_blocks is None:
        return RowCacheManager.allocate(model, rows, min(length, -(-positions // rows)))
    count = min(rows * -(-length // BLOCK), rows + -(-positions // BLOCK), MAX_BLOCKS)
    blocks = blocks_within(model.new_blocks, sys.maxsize, count, model.device)
    return PagedCacheManager(blocks, max_len=_table_length(model, length), cached_blocks=count)


def context_of(model: Model) -> int:
    return _DEFAULT_CONTEXT if model.max_seq_len is None else model.max_seq_len


def engine_slots(model: Model, max_sequences: int, cache_memory: int | None) -> CacheManager:
    """The cache of an engine. Raises `RequestError` for too little memory for one block.

    cache_memory: bytes of keys, values and recurrent states. None allocates for all sequences at full length, up to a
        quarter of the memory of the model's device. A paged cache takes memory only as it is written.
    """
    if cache_memory is not None:
        check_whole("cache_memory", cache_memory, low=1)
    limit = int(_MAX_MEMORY_SHARE * total_memory(model.device)) if cache_memory is None else cache_memory
    context = context_of(model)
    if model.new_blocks is None:
        return _engine_rows(model, max_sequences, context, limit, cache_memory)
    single = _one_block(model, context)
    unit = single.unit_nbytes
    limit = min(limit, max_sequences * single.cost(context) * unit)
    if limit < (minimum := single.cost(BLOCK) * unit):
        raise OptionError(
            "cache_memory",
            f"must be at least one block of {BLOCK} positions, {in_bytes(minimum)}; got {in_bytes(limit)}",
        )
    max_blocks = min(MAX_BLOCKS, max_sequences * -(-context // BLOCK))
    blocks = blocks_within(model.new_blocks, limit, max_blocks, model.device)
    return PagedCacheManager(blocks, max_len=context, cached_blocks=limit // unit, nbytes=limit)


def _engine_rows(model: Model, rows: int, context: int, limit: int, cache_memory: int | None) -> CacheManager:
    minimum = min(BLOCK, context)
    position = RowCacheManager(model.new_cache(1, minimum), 1, minimum, None).nbytes // minimum
    length = context if not position else min(context, limit // (rows * position))
    if length < minimum:
        raise RequestError(
            f"cache_memory={limit} bytes is too little for {rows} texts of {minimum} positions, of which each takes "
            f"{in_bytes(position)}: give more, or lower max_sequences"
        )
    cache = model.new_cache(rows, length)
    return RowCacheManager(cache, rows, length, dims_of(model, cache, rows), model)


def _one_block(model: Model, max_len: int) -> PagedCacheManager:
    """Slots over a single block, which show what a block and a sequence take."""
    assert model.new_blocks is not None, "checked by the caller"
    return PagedCacheManager(model.new_blocks(1), max_len=max_len, cached_blocks=0)


def _table_length(model: Model, length: int) -> int:
    """The positions of a block table: the same for every call if possible, so that all calls share programs."""
    return padded_length(max(length, _MIN_TABLE), model) if model.max_seq_len is None else model.max_seq_len


class SharedCache:
    """Slots shared by the calls of one owner, so that common prompt prefixes are processed once.

    memory: the most bytes of keys and values kept between calls, apart from those of sessions. store: returns the store
        of prefixes of a model, given its `computation`; None without one.
    """

    def __init__(self, memory: int, store: StoreOf | None = None) -> None:
        self.memory, self.store = memory, store
        self._shared: _Shared | None = None
        self._lock = threading.RLock()  # the garbage collector may close a stream, ending its lease, in any thread
        renew_in_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has its own slots."""
        return type(self), (self.memory, self.store)

    def renew(self) -> None:
        """In a forked child: a new lock. Leases of the parent's other threads end."""
        self._lock = threading.RLock()
        if self._shared is not None:
            self._shared.promised = 0

    @contextmanager
    def lease(
        self, model: Model, rows: int, length: int, prefix: "PinnedPrefix | None" = None
    ) -> Iterator[CacheManager]:
        """Slots with room for `rows` sequences of at most `length` positions until the lease ends.

        They are private if the shared slots have no room or the model's cache is not paged. Blocks promised to other
        leases count as used, so concurrent calls never take each other's room.

        prefix: the session's that the only sequence continues. It has private slots only if the cache is not paged.
        """
        if model.new_blocks is None:
            before = None if prefix is None else prefix.slots
            if not isinstance(before, RowCacheManager) or before.model is not model:
                before = RowCacheManager.allocate(model, rows, length)
            before.set_weights_version(computation(model))
            yield before
            return
        with self._lock:
            shared = self._shared_slots(model, length)
            slots, version = shared.slots, computation(model)
            slots.set_weights_version(version)
            slots.set_store(None if self.store is None else self.store(model, version))
            blocks = rows * slots.cost(length)
            if prefix is not None and prefix.pin is not None and prefix.slots is slots:
                blocks = max(0, blocks - slots.cost_of([prefix.pin]))
            available = slots.stats().available - shared.promised
            has_room = blocks <= available and length <= slots.max_len
            if has_room:
                shared.promised += blocks
        if not has_room and prefix is None:
            yield slots_for(model, rows, length)
            return
        if not has_room:
            raise ContextOverflowError(
                f"a session of {length} positions needs {blocks} more blocks of the cache, but {available} of "
                f"{slots.stats().total} are left: other sessions and running calls have the rest. Drop sessions that "
                "you no longer need, ask for fewer tokens, or set a larger prefix_memory"
            )
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
            unit = _one_block(model, 1).unit_nbytes
            slots = PagedCacheManager(
                blocks_within(model.new_blocks, limit, MAX_BLOCKS, model.device),
                max_len=_table_length(model, length),
                cached_blocks=min(self.memory, limit) // unit,
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


class PinnedPrefix:
    """The ids of one text whose keys and values are cached: those of the running request, or else a pinned prefix.

    A request finds the pinned prefix as any other. When it ends, however it ends, its slot becomes the pin.

    shared: returns the cache of the model.
    """

    def __init__(self, shared: Callable[[], SharedCache]) -> None:
        self._shared = shared
        self._reset()
        renew_in_forks(self)

    def _reset(self) -> None:
        self.slots: CacheManager | None = None
        self._owner: SharedCache | None = None  # of the slots
        self.pin: Slot | None = None
        self._ids: abc.Sequence[int] = ()
        self._running: Sequence | None = None
        self._thread = threading.get_ident()  # that has the slot

    def renew(self) -> None:
        """In a forked child: forget the text if the child lacks the thread, whose slots have been released."""
        if self._thread != threading.get_ident():
            self._reset()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting():  # then modules are cleared already
            self._drop()

    @property
    def tokens(self) -> list[int]:
        """The ids, in order of position."""
        if self._running is not None and self._running.slot is not None:
            return self._running.computed_ids()
        return [] if self.slots is None or self.pin is None else list(self._ids[: self.slots.pinned(self.pin)])

    @property
    def adapter(self) -> AdapterRef | None:
        """The adapter that computed the keys and values."""
        adapter: AdapterRef | None = None if self._source is None else self._source.adapter
        return adapter

    @property
    def _source(self) -> Slot | None:
        return self.pin if self._running is None or self._running.slot is None else self._running.slot

    def is_of(self, model: Model) -> bool:
        """Whether this model computed the keys and values, with its current weights."""
        version = None if self.slots is None else self.slots.weights_version
        return isinstance(version, tuple) and version[0] == WeightsVersion(model)

    def snapshot(self) -> tuple[Cache, int] | None:
        """The text as a dense cache of one row, with its number of positions. None if it is empty."""
        count = len(self.tokens)
        if not count or self.slots is None:
            return None
        cache = self.slots.read(self._source, count)
        return cache, (self.slots.max_len or count) if isinstance(self.slots, RowCacheManager) else count

    def adopt(
        self, model: Model, cache: Cache, capacity: int, ids: abc.Sequence[int], adapter: AdapterRef | None
    ) -> None:
        """Continue with a dense cache of one row of `capacity` positions, which `model` computed for `ids`."""
        rows = RowCacheManager(cache, 1, capacity, None, model)
        rows.set_weights_version(computation(model))
        lease = self._shared().lease(model, 1, len(ids), self) if model.new_blocks is not None else nullcontext(rows)
        with lease as slots:
            slot: Slot
            slot, _ = slots.acquire(ids, len(ids), reuse=False, adapter=adapter) or (None, 0)
            if slot is None:
                raise ContextOverflowError(f"there is no room in the cache for a session of {len(ids)} positions")
            self._drop()
            self.slots, self._owner, self._thread = slots, self._shared(), threading.get_ident()
            if isinstance(slots, PagedCacheManager):
                slots.write(slot, cache, len(ids))
            self.keep(slot, ids)

    def _follow(self, model: Model) -> None:
        """Copy the text to the model's cache if that is another one, as after a change of `prefix_memory`."""
        if self._owner not in (None, self._shared()) and isinstance(self.slots, PagedCacheManager):
            ids, adapter = self.tokens, self.adapter
            if self.is_of(model) and (snapshot := self.snapshot()) is not None:
                self.adopt(model, *snapshot, ids, adapter)

    @contextmanager
    def turn(self, model: Model, sequence: Sequence) -> Iterator[CacheManager]:
        """The cache for a request, which `sequence` is. Another request that has not ended cannot continue."""
        self._end_turn()
        self._follow(model)
        with self._shared().lease(model, 1, sequence.longest, self) as slots:
            if slots is not self.slots:
                self._drop()
            self.slots, self._running, self._thread, sequence.pinned = slots, sequence, threading.get_ident(), self
            self._owner = self._shared()
            try:
                yield slots
            finally:
                if self._running is sequence:
                    self._end_turn()

    def check(self, sequence: Sequence) -> None:
        """Raise `RequestError` unless this request is the last one."""
        if self._running is not sequence:
            raise RequestError(
                "this stream cannot continue: its session has since begun another request or was truncated; a session "
                "decodes one request at a time"
            )

    def keep(self, slot: Slot, ids: abc.Sequence[int]) -> None:
        """Release a slot whose first positions hold these ids, and pin them."""
        assert self.slots is not None, "a slot is of a manager"
        self.slots.release(slot, ids, pin=True)
        self.pin, self._ids = slot, ids

    def truncate(self, length: int) -> None:
        """Drop the ids from position `length` on.

        Raises:
            RequestError: a length below 0 or above the number of ids.
        """
        check_whole("length", length, low=0)
        if length > len(ids := self.tokens):
            raise RequestError(f"cannot truncate to {length} ids: only {len(ids)} are cached")
        self._end_turn()
        self._ids = ids[:length]
        if not length:
            self._drop()

    def _end_turn(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_exiting():  # a stream is closed after modules are cleared
            return
        running, self._running = self._running, None
        if running is not None and running.slot is not None:
            with sigint_deferred():
                self.keep(running.slot, running.computed_ids())
                running.slot = None

    def _drop(self) -> None:
        pin, self.pin, self._ids = self.pin, None, ()
        if self.slots is not None and pin is not None:
            self.slots.release(pin)


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
