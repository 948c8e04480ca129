"""How much work a chat template may do: a count of characters, the same on every machine, and no clock.

Each operation pays, before it runs, for the characters that it reads or makes; a value that is no text costs as much as
a short one. A value is measured as the tree that Python walks: forty lists, each of which holds the one before twice,
are forty objects and a text of terabytes.
"""

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError

# A prompt of a hundred pages costs a hundredth of this; a loop that only counts ends after two million turns.
_CHARACTERS = 2**24
# A long conversation adds to the budget: each of its characters may be read this many times.
_READINGS = 128
# The cost of an object that is no text, and the fixed cost of an operation.
_OBJECT = 8
# Arithmetic with longer numbers takes Python time that grows with the square of their length.
_MOST_BITS = 2**16

_CONTAINERS = (dict, list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class Budget:
    """The characters that one rendering has left."""

    def __init__(self, inputs: Any = ()) -> None:
        # Sizes of containers by id, each with the container to keep it alive. A template cannot change a container.
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._left = 2**62
        self._left = self._whole = _CHARACTERS + _READINGS * self.size(inputs)

    def spend(self, characters: int) -> None:
        """Take characters from the budget; raise `SecurityError` if it has not that many left."""
        self._left -= characters + _OBJECT
        if self._left < 0:
            raise SecurityError(f"more work than any conversation needs, {self._whole} characters for this one")

    def size(self, value: Any) -> int:
        """About how many characters a value has when written out. A container counts an item each time it holds it."""
        if isinstance(value, str | bytes):
            return len(value) + _OBJECT
        if isinstance(value, int):
            check_bits(value.bit_length())
            return _OBJECT
        if not isinstance(value, _CONTAINERS):
            return _OBJECT
        entry = self._sizes.get(id(value))
        if entry is None:
            parts = (part for item in value.items() for part in item) if isinstance(value, dict) else value
            entry = self._sizes[id(value)] = (value, _OBJECT + sum(map(self.size, parts)))
        if entry[1] > self._left:
            self.spend(entry[1])
        return entry[1]


def width(value: Any) -> int:
    """The characters of a text, or a fixed cost for each item of a container, whatever the items hold."""
    if isinstance(value, str | bytes):
        return len(value)
    return _OBJECT * len(value) if isinstance(value, (range, *_CONTAINERS)) else _OBJECT


def check_bits(count: int) -> None:
    """Raise `SecurityError` for a whole number of too many bits."""
    if count > _MOST_BITS:
        raise SecurityError(f"a number of {count} bits, and {_MOST_BITS} are the most")


_BUDGET: ContextVar[Budget] = ContextVar("budget of the template that is rendered")


def budget() -> Budget:
    """The budget of the template that this thread renders."""
    return _BUDGET.get()


@contextmanager
def budgeted(inputs: Any = ()) -> Iterator[None]:
    """Set a new budget within the block. `inputs` are the template's variables; they enlarge it."""
    token = _BUDGET.set(Budget(inputs))
    try:
        yield
    finally:
        _BUDGET.reset(token)
