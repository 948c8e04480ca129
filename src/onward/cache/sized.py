"""Protocols that a cache may follow, so that Onward can check its length and move its rows."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SizedCache(Protocol):
    """A cache that knows how many positions a row holds. A request that would overflow it raises before it runs."""

    @property
    def max_len(self) -> int: ...


@runtime_checkable
class CompactableCache(Protocol):
    """A cache whose rows can be moved and dropped, so that rows that have ended cost nothing more."""

    def copy_row(self, source: int, to: int, positions: int) -> None:
        """Copy the first `positions` positions of row `source` to row `to`."""
        ...

    def first_rows(self, batch: int) -> Any:
        """The cache of the first `batch` rows, over the same memory."""
        ...


def length_of(cache: object) -> int | None:
    """How many positions a row of the cache holds; None where the cache does not say."""
    return cache.max_len if cache is not None and isinstance(cache, SizedCache) else None
