"""What the loop carries from step to step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from onward.cache import CompactableCache
from onward.models import Cache


@dataclass(frozen=True)
class DecodeState:
    """Pending ids and the cache that they will be written into. There is an entry for each row of the cache.

    pending  ids not yet processed, one or more: a prompt, then the id emitted last
    offsets  absolute position of the first of them: what the row's cache already holds
    owners   which of the loop's rows it is
    live     whether that goes on; the others stand still and their output is dropped
    cache    pytree, as the model made it
    device   where tokens and offsets go
    compact  whether the cache may be narrowed to the rows that go on, so that the others cost nothing
    """

    pending: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    owners: tuple[int, ...]
    live: tuple[bool, ...]
    cache: Cache
    device: torch.device
    compact: bool = False

    @classmethod
    def start(
        cls,
        prompts: Sequence[Sequence[int]],
        cache: Cache,
        device: torch.device,
        offset: int | Sequence[int] = 0,
        compact: bool = False,
    ) -> Self:
        """Pending prompts (each of one id at least) over a cache that holds `offset` positions of every row."""
        assert all(prompts), "an empty prompt has nothing to predict from"
        count = len(prompts)
        offsets = (offset,) * count if isinstance(offset, int) else tuple(offset)
        pending = tuple(tuple(prompt) for prompt in prompts)
        return cls(pending, offsets, tuple(range(count)), (True,) * count, cache, device, compact)

    def advanced(self, pending: tuple[tuple[int, ...], ...], offsets: tuple[int, ...], cache: Cache) -> Self:
        """The state after a step. (`dataclasses.replace` takes as long as a tenth of a small model's step.)"""
        return type(self)(pending, offsets, self.owners, self.live, cache, self.device, self.compact)

    def only(self, going_on: Sequence[bool]) -> Self:
        """The state in which, of the loop's rows, only these go on; the others give up their rows of the cache."""
        live = tuple(self.live[i] and going_on[owner] for i, owner in enumerate(self.owners))
        if live == self.live or not any(live):
            return replace(self, live=live)
        if self.compact and isinstance(self.cache, CompactableCache):
            return self._compacted(live)
        return replace(self, live=live)

    def taken_back(self, place: int, last: int, count: int) -> Self:
        """The state in which the row at `place` ends with the id `last`, `count` ids before where it stands."""
        pending, offsets = list(self.pending), list(self.offsets)
        pending[place] = (last,)
        offsets[place] -= count
        return replace(self, pending=tuple(pending), offsets=tuple(offsets))

    def _compacted(self, live: Sequence[bool]) -> Self:
        """Rows from the end move into the places of rows that ended: one copy for each, not one of everything."""
        count = sum(live)
        places = list(range(count))
        later = [i for i in range(count, len(live)) if live[i]]
        for hole in (i for i in range(count) if not live[i]):
            places[hole] = later.pop()
            self.cache.copy_row(places[hole], hole, self.offsets[places[hole]])

        return replace(
            self,
            pending=tuple(self.pending[i] for i in places),
            offsets=tuple(self.offsets[i] for i in places),
            owners=tuple(self.owners[i] for i in places),
            live=(True,) * count,
            cache=self.cache.first_rows(count),
        )
