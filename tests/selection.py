"""The cases of a parametrized test that run by default: enough that every pair of values meets at least once.

Most faults depend on one or two values, so a set of cases that covers all pairs finds nearly all faults that the full
product finds (Kuhn, Wallace, Gallo: Software fault interactions and implications for software testing, IEEE TSE 30(6),
2004). The slowest tests run every nth of these cases (`stride`).
`ONWARD_TESTS=full` runs the product; so does `make test-full`, nightly and before a release.
"""

import functools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any


def covering(cases: Sequence[Mapping[str, Any]], strength: int = 2) -> list[int]:
    """Indices of cases in which every `strength` values of different parameters that occur together occur together.

    Greedy: each case taken covers the most combinations that are still missing. Where several cover as many, the one
    whose values were taken least, so that a short list of values is spread over a long one.

    Args:
        cases: the value of each parameter, by its name.
        strength: 2 covers pairs, 1 each value.
    """
    numbers = _Numbers()
    values = [[(name, numbers.of_value(value)) for name, value in sorted(case.items())] for case in cases]
    bits = _Numbers()
    masks = [sum(1 << bits.of(each) for each in combinations(case, min(strength, len(case)))) for case in values]
    missing = functools.reduce(operator.or_, masks, 0)
    uses: Counter[Hashable] = Counter()
    taken = []
    while missing:
        gains = [(mask & missing).bit_count() for mask in masks]
        most = max(gains)
        best = min(
            (index for index, gain in enumerate(gains) if gain == most),
            key=lambda index: sum(uses[value] for value in values[index]),
        )
        taken.append(best)
        uses.update(values[best])
        missing &= ~masks[best]
    return sorted(taken)


class _Numbers:
    """Assigns a number to each object, in the order of requests."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._alive: list[Any] = []  # an id must not become another object's

    def of(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def of_value(self, value: Any) -> int:
        """Values that are equal and of one type have one number, where they can be hashed."""
        try:
            return self.of((type(value), value))
        except TypeError:
            self._alive.append(value)
            return self.of(("id", id(value)))


def selected(
    items: Sequence[Any], strength_of: Callable[[Any], int], stride_of: Callable[[Any], int] = lambda item: 1
) -> tuple[list[Any], list[Any]]:
    """pytest's items as (those to run, the others), each in order.

    strength_of: of an item's test; 0 runs all of its cases. stride_of: 3 runs every third of the cases that are left;
    0 runs none.
    """
    tests: dict[Hashable, list[Any]] = {}
    for item in items:
        tests.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    chosen: set[int] = set()
    for cases in tests.values():
        strength = strength_of(cases[0])
        all_cases = strength == 0 or not all(hasattr(case, "callspec") for case in cases)
        indices = range(len(cases)) if all_cases else covering([case.callspec.params for case in cases], strength)
        stride = stride_of(cases[0])
        chosen.update(id(cases[index]) for index in (indices[::stride] if stride else ()))
    return [item for item in items if id(item) in chosen], [item for item in items if id(item) not in chosen]
