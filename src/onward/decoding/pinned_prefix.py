"""A prefix whose keys and values stay in the cache between requests.

Entries at or past the computed positions are never read. So after an edit only the ids from the edit on are processed
again, and nothing is cleared.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

from onward.cache import AdapterRef
from onward.cache.manager import PagedCacheManager
from onward.cache.slot import digest_of
from onward.decoding.cache_manager import CacheManager, Slot
from onward.decoding.row_cache import RowCacheManager
from onward.decoding.shared_cache import Lease, private_lease
from onward.errors import ContextOverflowError, RequestError
from onward.models import Cache, Model
from onward.models.model import WeightsVersion, computation
from onward.util.checks import check_whole
from onward.util.process import renew_in_forks


class CacheSnapshot(NamedTuple):
    """A cache of one row and its number of positions."""

    cache: Cache
    capacity: int


class PinnedPrefix:
    """A slot that is reused from request to request.

    The common prefix of a prompt and the slot's ids is not processed again. A different model or adapter, changed
    weights, other kernels and autocast discard all ids.

    lease: leases slots. adapter: the adapter that computed the slot's keys and values.
    """

    def __init__(self, lease: Lease = private_lease) -> None:
        self._lease = lease
        self._slots: CacheManager | None = None
        self._slot: Slot = None
        self._tokens: list[int] = []
        self._weights: WeightsVersion | None = None
        self._computation: tuple[object, ...] = ()
        self.adapter: AdapterRef | None = None
        self._turns = 0
        renew_in_forks(self)

    def renew(self) -> None:
        """In a forked child, the slot of a thread that the child lacks was released, so discard it."""
        if isinstance(self._slots, PagedCacheManager) and self._slot.thread != threading.get_ident():
            self._slots, self._slot, self._tokens, self.adapter = None, None, [], None
            self._turns += 1

    @property
    def tokens(self) -> list[int]:
        """The ids whose keys and values are in the slot, in order of position."""
        return list(self._tokens)

    @property
    def snapshot(self) -> CacheSnapshot | None:
        """The slot as a dense cache of one row, a copy if the cache is paged; None before there is one."""
        if isinstance(self._slots, PagedCacheManager):
            count = len(self._tokens)
            return CacheSnapshot(self._slots.read(self._slot, count), count) if count else None
        if self._slots is None:
            return None
        assert isinstance(self._slots, RowCacheManager)
        assert self._slots.length is not None
        return CacheSnapshot(self._slots.cache, self._slots.length)

    def is_of(self, model: Model) -> bool:
        """Whether this model computed the slot, with its current weights."""
        return self._weights is not None and self._weights == WeightsVersion(model)

    def adopt(
        self, model: Model, snapshot: CacheSnapshot, tokens: Sequence[int], adapter: AdapterRef | None = None
    ) -> None:
        """Continue with a cache that `model` computed for `tokens` with an adapter."""
        self._release()
        count = len(tokens)
        with self._lease(model, 1, max(count, 1)) as slots:  # until the slot is allocated
            if not isinstance(slots, PagedCacheManager):
                slots = RowCacheManager(snapshot.cache, 1, snapshot.capacity, None, model, [count])
            acquired = slots.acquire(tokens, count, reuse=False, adapter=adapter)
        assert acquired is not None, "the slots have room for one sequence"
        slot: Slot = acquired[0]
        if isinstance(slots, PagedCacheManager):
            slots.write(slot, snapshot.cache, count)
        self._slots, self._slot, self.adapter = slots, slot, adapter
        self._computation = now = computation(model)
        self._weights = now[0]
        self._tokens = list(tokens)

    def __del__(self) -> None:
        if self._slots is not None:
            self._slots.release_later(self._slot, self._tokens)

    def truncate(self, length: int) -> None:
        """Drop the ids from position `length` on; nothing is moved or cleared.

        Raises:
            RequestError: a length below 0 or above the number of ids.
        """
        check_whole("length", length, low=0)
        if length > len(self._tokens):
            raise RequestError(f"cannot truncate to {length} ids: only {len(self._tokens)} are cached")
        self._turns += 1
        del self._tokens[length:]

    def begin(self, model: Model, prompt: Sequence[int], length: int, adapter: AdapterRef | None = None) -> "Turn":
        """Prepare for a prompt of at least one id, continued to at most `length` positions.

        Ids past the common prefix are dropped, since the request overwrites their keys and values.
        """
        now = computation(model)
        # The last id is always processed, because the model predicts the next one from it.
        is_same = now == self._computation and digest_of(adapter) == digest_of(self.adapter)
        reused = min(common_prefix(self._tokens, prompt), len(prompt) - 1) if is_same else 0
        # Shared blocks must all be of one computation, because other requests can find them.
        is_stale = now != self._computation and isinstance(self._slots, PagedCacheManager)
        if is_stale or self._weights is None or not self._weights.is_of(model):
            self._release()
        self._turns += 1
        # The ids are dropped before the slot changes: an interrupt must not leave more ids than the slot holds.
        del self._tokens[reused:]
        if self._slots is not None and not self._slots.holds(self._slot, reused):
            reused = 0
            self._tokens.clear()
        if adapter is not self.adapter or not self._make_room(reused, length):  # a slot never changes its adapter
            reused = self._move(model, reused, length, adapter)
        self._computation, self._weights = now, now[0]
        assert self._slots is not None
        return Turn(self, reused, self._turns)

    def _make_room(self, reused: int, length: int) -> bool:
        """Truncate the slot and make room for `length` positions. Returns False if there is none."""
        if self._slots is None:
            return False
        try:
            self._slots.truncate(self._slot, reused)
            return self._slots.reserve(self._slot, length)
        except ContextOverflowError:  # the truncated block is shared, or the cache is too small
            return False

    def _move(self, model: Model, reused: int, length: int, adapter: AdapterRef | None) -> int:
        """Move to a new slot of `length` positions. Returns how many `reused` positions it holds: all or none."""
        old, old_slot, tokens = self._slots, self._slot, self._tokens[:reused]
        requested = length
        if isinstance(old, PagedCacheManager):  # room for twice as many, so a growing sequence is copied at most twice
            requested = max(length, min(2 * reused, length if model.max_seq_len is None else model.max_seq_len))
        with self._lease(model, 1, requested) as slots:  # until the slot is allocated
            acquired = slots.acquire((), length, reuse=False, adapter=adapter)
        assert acquired is not None, "the slots have room for one sequence"
        slot, _ = acquired
        if isinstance(old, PagedCacheManager) and isinstance(slots, PagedCacheManager) and reused:
            slots.write(slot, old.read(old_slot, reused), reused)
        else:
            tokens = []
        self._release()
        self._slots, self._slot, self._tokens, self.adapter = slots, slot, tokens, adapter
        return len(tokens)

    def _release(self) -> None:
        self._turns += 1
        tokens, self._tokens = self._tokens, []
        if self._slots is not None:
            self._slots.release(self._slot, tokens)
        self._slots = self._slot = self.adapter = None


class Turn:
    """One request over a `PinnedPrefix`. reused: the number of prompt ids already in its slot."""

    def __init__(self, prefix: PinnedPrefix, reused: int, number: int) -> None:
        assert prefix._slots is not None, "a turn begins with a slot"
        self.slots, self.slot, self.reused = prefix._slots, prefix._slot, reused
        self._prefix, self._number = prefix, number

    def note(self, ids: Sequence[int]) -> None:
        """Record the ids that the slot holds now."""
        if self._prefix._turns == self._number:
            self._prefix._tokens = list(ids)

    def check(self) -> None:
        """Raise `RequestError` if another request has since begun in the same slot."""
        if self._prefix._turns != self._number:
            raise RequestError(
                "this stream cannot continue: its session has since begun another request or was truncated; a session "
                "decodes one request at a time"
            )


def common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    length = min(len(ids), len(others))
    # Usually one continues the other, and comparing whole lists is fast.
    if list(ids[:length]) == list(others[:length]):
        return length
    return next(index for index in range(length) if ids[index] != others[index])
