"""What a forward gets of slots."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class View(NamedTuple):
    """The cache that a forward gets, and which of its rows are those of the slots.

    rows: the row of each slot asked for. offsets: for every row of the cache the position from which a forward may
    write where the row is none of these; None where the cache has the rows asked for alone, in order.
    """

    cache: Any
    rows: Sequence[int]
    offsets: Sequence[int] | None = None
