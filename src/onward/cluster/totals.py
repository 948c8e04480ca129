"""Numbers of several replicas as one: counts are added up, and those of replicas that are gone stay in them.

Nothing here knows Ray or HTTP.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from statistics import fmean
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)

# Replicas that are gone whose counts are kept one by one; those of earlier ones are kept as a sum.
_GONE = 64


class Kind(enum.Enum):
    """How numbers of several replicas make one."""

    COUNT = enum.auto()  # only grows: the sum, with the last counts of replicas that are gone
    SUM = enum.auto()  # of what replicas have now
    MEAN = enum.auto()  # of a ratio, where a sum says nothing


class Totals(Generic[_Key]):
    """The numbers of all replicas together, from one reading to the next. kind: of a number, by its key.

    A count never falls, whichever replicas answer: of one that does not answer, or is gone, its last count goes on to
    be part of the sum. What it counted after that is missing.
    """

    def __init__(self, kind: Callable[[_Key], Kind]) -> None:
        self._kind = kind
        self._counts: OrderedDict[str, dict[_Key, float]] = OrderedDict()  # of each replica, the latest last
        self._earlier: dict[_Key, float] = {}

    def merged(self, readings: Mapping[str, Mapping[_Key, float]], names: Collection[str] = ()) -> dict[_Key, float]:
        """The numbers of all.

        Args:
            readings: the numbers of each replica that has answered.
            names: of all replicas that are there.
        """
        present: dict[_Key, list[float]] = {}
        for replica, numbers in readings.items():
            counts = self._counts.setdefault(replica, {})
            self._counts.move_to_end(replica)
            for key, number in numbers.items():
                if self._kind(key) is Kind.COUNT:
                    counts[key] = max(number, counts.get(key, 0))
                else:
                    present.setdefault(key, []).append(number)
        self._fold(readings.keys() | set(names))
        sums = self._earlier.copy()
        for counts in self._counts.values():
            _add(sums, counts)
        now = {key: fmean(each) if self._kind(key) is Kind.MEAN else sum(each) for key, each in present.items()}
        return {**sums, **now}

    def _fold(self, present: Collection[str]) -> None:
        gone = [replica for replica in self._counts if replica not in present]
        for replica in gone[: max(0, len(gone) - _GONE)]:
            _add(self._earlier, self._counts.pop(replica))


def _add(sums: dict[_Key, float], counts: Mapping[_Key, float]) -> None:
    for key, count in counts.items():
        sums[key] = sums.get(key, 0) + count
