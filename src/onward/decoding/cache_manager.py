"""Where sequences keep their keys and values: the protocol.

A slot holds the computed positions of one sequence. What a forward gets is a view of the slots that it serves.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from onward.cache import AdapterRef
from onward.cache.slot import CacheView
from onward.models import Cache

Slot = Any
# (first, last) -> the ids at the positions first … last - 1 of a slot
Ids = Callable[[int, int], Sequence[int]]


class CacheManager(Protocol):
    """Keeps keys and values of sequences.

    lock: held by callers from `view_of` to `put`.
    total: how many blocks there are; a block is what a slot takes room by. available: those that can be had now.
    cached: those of them that hold what may be found. hits, lookups: ids that were found so, and that were looked for.
    whole: whether a forward always gets all rows, padded to one length, for the cache does not show where its rows are.
    shares_rows: whether several rows of a view may be those of one slot.
    """

    lock: threading.RLock
    whole: bool
    shares_rows: bool

    @property
    def total(self) -> int: ...

    @property
    def available(self) -> int: ...

    @property
    def cached(self) -> int: ...

    hits: int
    lookups: int

    def blocks_for(self, length: int) -> int:
        """How many blocks a slot of so many positions takes."""
        ...

    def shared_blocks(self, positions: int) -> int:
        """How many of them a fork at so many positions shares with the slot that it is a fork of."""
        ...

    def blocks_of(self, slots: Sequence[Slot]) -> int:
        """How many blocks these slots hold together."""
        ...

    def acquire(
        self, ids: Sequence[int], length: int, *, reuse: bool = True, adapter: AdapterRef | None = None
    ) -> tuple[Slot, int] | None:
        """A slot for `length` positions, and how many of these ids it holds already, at most all but the last.

        adapter: that the slot's keys and values are computed with, for as long as it lives; forks have it too.
        None: there is no room now; nothing has changed.
        """
        ...

    def fork(self, slot: Slot, positions: int, length: int) -> Slot | None:
        """A slot of its own for `length` positions that holds the first `positions` of another. None: there is no room,
        the cache's rows cannot be copied, or it has no recurrent states of so many positions any more."""
        ...

    def reserve(self, slot: Slot, length: int) -> bool:
        """Make room for `length` positions. False: there is none now."""
        ...

    def holds(self, slot: Slot, positions: int) -> bool:
        """Whether the slot could go on from so many positions, which it has held: it could not where the recurrent
        states of so many are not there any more."""
        ...

    def truncate(self, slot: Slot, positions: int) -> None:
        """Forget what the slot holds from `positions` on, which will be written anew."""
        ...

    def advance(self, slot: Slot, computed: int, ids: Ids) -> None:
        """Note that the first `computed` positions are final. ids: (first, last) -> the ids that they hold."""
        ...

    def release(self, slot: Slot, ids: Sequence[int] = ()) -> None:
        """Let a slot go, whose first positions hold these ids."""
        ...

    def release_later(self, slot: Slot, ids: Sequence[int] = ()) -> None:
        """`release` for the garbage collector, which may call it in the midst of any other method."""
        ...

    def groups(self, slots: Sequence[Slot], tokens: int) -> list[list[int]]:
        """Which of the slots, by index, one forward of `tokens` tokens a row serves together."""
        ...

    def set_weights_version(self, key: object) -> None:
        """Say which weights compute what is kept from now on. Another key than before: nothing kept is found."""
        ...

    def max_step_tokens(self, slots: Sequence[Slot], computed: Sequence[int]) -> int | None:
        """How many tokens a row one forward over these slots may process, each from what it has computed on, if any of
        them may be taken back; None if unknown."""
        ...

    def max_chunk(self, slot: Slot, first: int, count: int) -> int:
        """How many of `count` ids of a prompt, from position `first` of a slot on, to process at once."""
        ...

    def ensure_writable(self, slots: Sequence[Slot], firsts: Sequence[int], tokens: int) -> None:
        """See that a forward may write so many tokens of each slot from its first position on: as many as `piece` says,
        or as `room` does. To be called before `view_of`."""
        ...

    def view_of(self, slots: Sequence[Slot], tokens: int) -> CacheView:
        """The cache that a forward of so many tokens a row over these slots gets."""
        ...

    def check_written(self, view: CacheView, cache: Cache) -> None:
        """Take the cache that a forward returned for a view."""
        ...
