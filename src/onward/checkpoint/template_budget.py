"""How much work a chat template may do: a count of characters, the same on every machine, and no clock.

Each operation pays, before it is done, for the characters that it reads or makes; whatever is no text pays as a short
one. What Python would walk as a tree is measured as a tree: forty lists, each of which holds the one before twice, are
forty objects and a text of terabytes.
"""

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError

# A prompt of a hundred pages costs a hundredth of it; a loop that only counts ends after two million turns.
_CHARACTERS = 2**24
# What a long conversation adds: every character of it may be read this many times.
_READINGS = 128
# An object that is no text, and whatever an operation costs besides.
_OBJECT = 8
# Python's arithmetic of longer numbers takes time that grows with the square of them.
_MOST_BITS = 2**16

_CONTAINERS = (dict, list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class Budget:
    """The characters that one rendering has left."""

    def __init__(self, inputs: Any = ()) -> None:
        # By identity, each kept alive: a template cannot change a container.
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._left = 2**62
        self._left = self._whole = _CHARACTERS + _READINGS * self.size(inputs)

    def spend(self, characters: int) -> None:
        """Raises `SecurityError` where nothing is left."""
        self._left -= characters + _OBJECT
        if self._left < 0:
            raise SecurityError(f"more work than any conversation needs, {self._whole} characters for this one")

    def size(self, value: Any) -> int:
        """The characters of a value, written out, about; a container counts what it holds each time it holds it."""
        if isinstance(value, str | bytes):
            return len(value) + _OBJECT
        if isinstance(value, int):
            check_bits(value.bit_length())
            return _OBJECT
        if not isinstance(value, _CONTAINERS):
            return _OBJECT
        known = self._sizes.get(id(value))
        if known is None:
            parts = (part for item in value.items() for part in item) if isinstance(value, dict) else value
            known = self._sizes[id(value)] = (value, _OBJECT + sum(map(self.size, parts)))
        if known[1] > self._left:
            self.spend(known[1])
        return known[1]


def width(value: Any) -> int:
    """The characters of a value, without what it holds inside."""
    if isinstance(value, str | bytes):
        return len(value)
    return _OBJECT * len(value) if isinstance(value, (range, *_CONTAINERS)) else _OBJECT


def check_bits(count: int) -> None:
    """Raise `SecurityError` for a whole number of too many bits."""
    if count > _MOST_BITS:
        raise SecurityError(f"a number of {count} bits, and {_MOST_BITS} are the most")


_BUDGET: ContextVar[Budget] = ContextVar("budget of the template that is rendered")


def budget() -> Budget:
    """Of the template that this thread renders."""
    return _BUDGET.get()


@contextmanager
def budgeted(inputs: Any = ()) -> Iterator[None]:
    """A new budget, for as long as the block runs; `inputs` are what the user gave to read."""
    token = _BUDGET.set(Budget(inputs))
    try:
        yield
    finally:
        _BUDGET.reset(token)
