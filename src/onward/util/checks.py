"""Validation of option values."""

import sys
from collections.abc import Iterable
from typing import Any

from onward.errors import OptionError


def check_whole(name: str, value: object, *, low: int) -> None:
    """Raise `OptionError` unless `value` is an int (not a bool) of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise OptionError(name, f"must be a whole number of {low} or more; got {value!r}")


def check_id(name: str, value: object) -> None:
    """Raise `OptionError` unless an item of an option is a token id."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise OptionError(name, f"must have ids that are whole numbers from 0 to 2147483647; got {value!r}")


def is_number(value: object) -> bool:
    """Whether it is an int or a float, including NaN and infinities, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number within the range of a float, which an int may exceed."""
    return is_number(value) and abs(value) <= sys.float_info.max


# The types of almost all options, checked first.
_BUILTIN_TYPES = frozenset((int, float, bool, str, tuple, type(None)))


def plain(value: Any) -> Any:
    """Scalars of numpy, arrays and tensors as Python's numbers and lists; other values unchanged."""
    if type(value) in _BUILTIN_TYPES or isinstance(value, type):
        return value
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()


def plain_items(values: Iterable[Any]) -> list[Any]:
    """A list of Python values from a one-dimensional array or tensor, or from an iterable of scalars."""
    return [plain(item) for item in plain(values)]


def as_tuple(name: str, value: object, single: type) -> tuple[Any, ...]:
    """One value or several as a tuple. Raises `OptionError` for neither a `single` nor an iterable."""
    if isinstance(value, single):
        return (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(name, f"must be one {single.__name__} or a list of them; got {value!r}")
    return tuple(plain_items(value))
