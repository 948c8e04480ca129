"""What any cache may tell about itself."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class SizedCache(Protocol):
    """A cache that knows how many positions a row holds: a request that would overflow it raises beforehand."""

    @property
    def max_len(self) -> int: ...
