"""Protocols that a cache may follow: then Onward can check its length and knows its dimensions."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SizedCache(Protocol):
    """A cache that knows how many positions a row holds. A request that would overflow it raises before it runs."""

    @property
    def max_len(self) -> int: ...


@runtime_checkable
class NamedDims(Protocol):
    """A cache that says what the dimensions of its tensors count, so that a program need not guess.

    leaf_dims: for each leaf the names of its dimensions. "rows" counts the rows of a call. "blocks" counts memory that
    rows share: its number makes no difference to a program. Sizes of any other name belong to a program's shape.
    """

    @property
    def leaf_dims(self) -> Sequence[tuple[str, ...]]: ...

    def blank(self) -> Any:
        """An empty cache of as many rows and positions, over memory of its own."""
        ...


def length_of(cache: object) -> int | None:
    """How many positions a row of the cache holds; None where the cache does not say."""
    return cache.max_len if cache is not None and isinstance(cache, SizedCache) else None
