"""What any cache may tell about itself."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SizedCache(Protocol):
    """A cache that knows how many positions a row holds: a request that would overflow it raises beforehand."""

    @property
    def max_len(self) -> int: ...


@runtime_checkable
class CompactableCache(Protocol):
    """A cache whose rows can be moved and narrowed: rows that have ended then cost no more."""

    def copy_row(self, source: int, to: int, positions: int) -> None:
        """Have row `to` hold the first `positions` positions of row `source`."""
        ...

    def first_rows(self, batch: int) -> Any:
        """The cache of the first `batch` rows, over the same memory."""
        ...


def length_of(cache: object) -> int | None:
    """Positions that a cache holds a row; None where it does not say."""
    return cache.max_len if cache is not None and isinstance(cache, SizedCache) else None
