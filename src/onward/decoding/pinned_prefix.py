"""A text whose keys and values are held between requests.

Entries at or past a text's computed positions are never read. So an edited text keeps its ids up to the edit, and only
the ids after it are processed again. Nothing is cleared: fewer ids take the others back.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

from onward.cache import AdapterRef
from onward.cache.manager import PagedCacheManager
from onward.cache.slot import Slot as PagedSlot
from onward.cache.slot import digest_of
from onward.decoding.cache_manager import CacheManager, Slot
from onward.decoding.row_cache import RowCacheManager
from onward.decoding.shared_cache import Lease, lease_of_own
from onward.errors import ContextOverflowError, RequestError
from onward.models import Cache, Model
from onward.models.model import WeightsVersion, computation
from onward.util.checks import check_whole
from onward.util.process import renew_in_forks


class CacheSnapshot(NamedTuple):
    """A cache of one row and how many positions it has room for."""

    cache: Cache
    capacity: int


class PinnedPrefix:
    """The slot of one text, from request to request.

    A prompt is compared with the ids that the slot holds, and their common prefix is not processed again. Another
    model, changed weights, other kernels, autocast or another adapter make it forget all ids.

    lease: of slots to hold it in. adapter: that what is held was computed with.
    """

    def __init__(self, lease: Lease = lease_of_own) -> None:
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
        """In a forked child: a slot of a thread that the child does not have was let go, so nothing is held."""
        if isinstance(self._slots, PagedCacheManager) and self._slot.thread != threading.get_ident():
            self._slots, self._slot, self._tokens, self.adapter = None, None, [], None
            self._turns += 1

    @property
    def tokens(self) -> list[int]:
        """The ids whose keys and values are held, in order of position."""
        return list(self._tokens)

    @property
    def held(self) -> CacheSnapshot | None:
        """The cache of one row that holds them, a copy where they lie in blocks; None before there is one."""
        if isinstance(self._slots, PagedCacheManager):
            count = len(self._tokens)
            return CacheSnapshot(self._slots.read(self._slot, count), count) if count else None
        if self._slots is None:
            return None
        assert isinstance(self._slots, RowCacheManager)
        assert self._slots.length is not None
        return CacheSnapshot(self._slots.cache, self._slots.length)

    def is_of(self, model: Model) -> bool:
        """Whether this model computed what is held, with the weights that it has now."""
        return self._weights is not None and self._weights == WeightsVersion(model)

    def adopt(
        self, model: Model, held: CacheSnapshot, tokens: Sequence[int], adapter: AdapterRef | None = None
    ) -> None:
        """Go on with a cache of `model`, and of an adapter, that holds `tokens`."""
        self._let_go()
        count = len(tokens)
        with self._lease(model, 1, max(count, 1)) as slots:  # until the slot is there
            if not isinstance(slots, PagedCacheManager):
                slots = RowCacheManager(held.cache, 1, held.capacity, None, model, [count])
            acquired = slots.acquire(tokens, count, reuse=False, adapter=adapter)
        assert acquired is not None, "the slots have room for one text"
        slot, _ = acquired
        if isinstance(slots, PagedCacheManager):
            assert isinstance(slot, PagedSlot)
            slots.write(slot, held.cache, count)
        self._slots, self._slot, self.adapter = slots, slot, adapter
        self._computation = now = computation(model)
        self._weights = now[0]
        self._tokens = list(tokens)

    def __del__(self) -> None:
        if self._slots is not None:
            self._slots.release_later(self._slot, self._tokens)

    def truncate(self, length: int) -> None:
        """Forget the ids from position `length` on; nothing is moved or cleared.

        Raises:
            RequestError: a length below 0 or above what is held.
        """
        check_whole("length", length, low=0)
        if length > len(self._tokens):
            raise RequestError(f"{len(self._tokens)} ids are held; to forget those from {length} on there must be more")
        self._turns += 1
        del self._tokens[length:]

    def begin(self, model: Model, prompt: Sequence[int], length: int, adapter: AdapterRef | None = None) -> "Turn":
        """Prepare for a prompt (of one id at least) in a text of at most `length` positions, with an adapter or none.

        The ids past the common prefix are forgotten: the request's own keys and values will take their place.
        """
        now = computation(model)
        # The last id is always processed, for the model predicts the next one from it.
        is_same = now == self._computation and digest_of(adapter) == digest_of(self.adapter)
        kept = min(common_prefix(self._tokens, prompt), len(prompt) - 1) if is_same else 0
        if self._weights is None or not self._weights.is_of(model):
            self._let_go()
        elif now != self._computation and isinstance(self._slots, PagedCacheManager):
            self._let_go()  # what others find in blocks is of one computation
        self._turns += 1
        # The ids are dropped before the slot changes: an interrupt must not leave more ids than the slot holds.
        del self._tokens[kept:]
        if self._slots is not None and not self._slots.holds(self._slot, kept):
            kept = 0
            self._tokens.clear()
        if adapter is not self.adapter or not self._make_room(kept, length):  # a slot has one adapter for its life
            kept = self._move(model, kept, length, adapter)
        self._computation, self._weights = now, now[0]
        assert self._slots is not None
        return Turn(self, kept, self._turns)

    def _make_room(self, kept: int, length: int) -> bool:
        """Make room for `length` positions in the slot, of which it holds the first `kept`. False: there is none."""
        if self._slots is None:
            return False
        try:
            self._slots.truncate(self._slot, kept)
            return self._slots.reserve(self._slot, length)
        except ContextOverflowError:  # others share the block that is cut; or there never is room for so many
            return False

    def _move(self, model: Model, kept: int, length: int, adapter: AdapterRef | None) -> int:
        """Take a new slot of `length` positions. Returns how many of the `kept` ones it holds: all or none."""
        old, old_slot, tokens = self._slots, self._slot, self._tokens[:kept]
        asked = length
        if isinstance(
            old, PagedCacheManager
        ):  # room for twice as many, so that a text that grows is copied twice at most
            asked = max(length, min(2 * kept, length if model.max_seq_len is None else model.max_seq_len))
        with self._lease(model, 1, asked) as slots:  # until the slot is there
            acquired = slots.acquire((), length, reuse=False, adapter=adapter)
        assert acquired is not None, "the slots have room for one text"
        slot, _ = acquired
        if isinstance(old, PagedCacheManager) and isinstance(slots, PagedCacheManager) and kept:
            slots.write(slot, old.read(old_slot, kept), kept)
        else:
            tokens = []
        self._let_go()
        self._slots, self._slot, self._tokens, self.adapter = slots, slot, tokens, adapter
        return len(tokens)

    def _let_go(self) -> None:
        self._turns += 1
        tokens, self._tokens = self._tokens, []
        if self._slots is not None:
            self._slots.release(self._slot, tokens)
        self._slots = self._slot = self.adapter = None


class Turn:
    """One request over a `PinnedPrefix`. kept: how many ids of the prompt it holds."""

    def __init__(self, text: PinnedPrefix, kept: int, number: int) -> None:
        assert text._slots is not None, "a turn begins with a slot"
        self.slots, self.slot, self.kept = text._slots, text._slot, kept
        self._text, self._number = text, number

    def note(self, ids: Sequence[int]) -> None:
        """Note the ids that the slot holds now."""
        if self._text._turns == self._number:
            self._text._tokens = list(ids)

    def check(self) -> None:
        """Raise `RequestError` if another request has begun since in the same slot."""
        if self._text._turns != self._number:
            raise RequestError(
                "this stream cannot go on: its session has begun another request since, or was truncated; a "
                "session decodes one text at a time"
            )


def common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    """The length of the longest common prefix of two texts."""
    length = min(len(ids), len(others))
    # Most often one text continues the other, and comparing whole lists is fast.
    if list(ids[:length]) == list(others[:length]):
        return length
    return next(index for index in range(length) if ids[index] != others[index])
