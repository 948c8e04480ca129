"""Validation of option values."""

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from onward.errors import RequestError

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def check_whole(name: str, value: object, *, low: int) -> None:
    """Raise `RequestError` unless `value` is an int (not a bool) of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise RequestError(f"{name} must be a whole number of {low} or more; got {value!r}")


def is_number(value: object) -> bool:
    """Whether it is an int or a float, including NaN and infinities, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number within the range of a float, which an int may exceed."""
    return is_number(value) and abs(value) <= sys.float_info.max


def is_float32(value: Any) -> bool:
    """Whether it is a number within the range of float32, the dtype of logits."""
    return is_number(value) and abs(value) <= _FLOAT32_MAX


# The types of almost all options, checked first to avoid torch's slow metaclass.
BUILTIN_TYPES = frozenset((int, float, bool, str, tuple, type(None)))
_ARRAY_TYPES = (np.generic, np.ndarray, Tensor)


def plain(value: Any) -> Any:
    """Scalars of numpy, arrays and tensors as Python's numbers and lists; other values unchanged."""
    if type(value) in BUILTIN_TYPES:
        return value
    return value.tolist() if isinstance(value, _ARRAY_TYPES) else value


def plain_items(values: Iterable[Any]) -> list[Any]:
    """A list of Python values from a one-dimensional array or tensor, or from an iterable of scalars."""
    return [plain(item) for item in plain(values)]


def as_tuple(name: str, value: object, single: type) -> tuple[Any, ...]:
    """One value or several as a tuple. Raises `RequestError` for neither a `single` nor an iterable."""
    if isinstance(value, single):
        return (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be one {single.__name__} or a list of them; got {value!r}")
    return tuple(plain_items(value))
