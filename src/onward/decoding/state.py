"""What the loop carries from step to step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from onward.cache import CompactableCache
from onward.models import Cache


@dataclass(frozen=True)
class DecodeState:
    """Pending ids and the cache that they will be written into.

    The tuples have an entry for each row of the cache. A row's index in them is its place; places change when the cache
    is narrowed, owners do not.

    pending  the ids not yet processed, one or more: at first the prompt, later the id emitted last
    offsets  the absolute position of the first pending id, which is how many positions the row's cache holds
    owners   the index of the loop's row that this row of the cache serves
    live     whether that row goes on; a row that has ended does not move, and its output is dropped
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
        """The state after a step.

        This does not call `dataclasses.replace`, which takes a tenth of the time of a small model's step.
        """
        return type(self)(pending, offsets, self.owners, self.live, cache, self.device, self.compact)

    def only(self, going_on: Sequence[bool]) -> Self:
        """The state in which only some of the loop's rows go on, those for which `going_on` is true.

        The others give up their rows of the cache, where it can be narrowed.
        """
        live = tuple(self.live[i] and going_on[owner] for i, owner in enumerate(self.owners))
        if live == self.live or not any(live):
            return replace(self, live=live)
        if self.compact and isinstance(self.cache, CompactableCache):
            return self._compacted(live)
        return replace(self, live=live)

    def taken_back(self, place: int, last: int, count: int) -> Self:
        """The state in which the row at `place` has lost its last `count` ids and ends with the id `last`."""
        pending, offsets = list(self.pending), list(self.offsets)
        pending[place] = (last,)
        offsets[place] -= count
        return replace(self, pending=tuple(pending), offsets=tuple(offsets))

    def _compacted(self, live: Sequence[bool]) -> Self:
        """Move rows from the end into the places of rows that ended. So few rows are copied, never the whole cache."""
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
