"""Checks of option values."""

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from onward.errors import RequestError

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def check_whole(name: str, value: object, *, low: int) -> None:
    """Raise `RequestError` unless `value` is an int (and no bool) of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise RequestError(f"{name} must be a whole number of {low} or more; got {value!r}")


def is_number(value: object) -> bool:
    """Whether it is an int or a float, and no bool; NaN and infinities are numbers too."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number within the range of a float, as an int may not be."""
    return is_number(value) and abs(value) <= sys.float_info.max


def is_float32(value: Any) -> bool:
    """Whether it is a number within the range of float32, as numbers are that meet logits."""
    return is_number(value) and abs(value) <= _FLOAT32_MAX


# What almost every option is, told apart without asking torch's metaclass.
PYTHONS_OWN = frozenset((int, float, bool, str, tuple, type(None)))
_OTHERS = (np.generic, np.ndarray, Tensor)


def plain(value: Any) -> Any:
    """numpy's scalars, arrays and tensors as Python's numbers and lists; anything else as it is."""
    if type(value) in PYTHONS_OWN:
        return value
    return value.tolist() if isinstance(value, _OTHERS) else value


def plain_items(values: Iterable[Any]) -> list[Any]:
    """An array or a tensor of one dimension, or an iterable whose items may be numpy's or torch's, as a list."""
    return [plain(item) for item in plain(values)]


def as_tuple(name: str, value: object, single: type) -> tuple[Any, ...]:
    """One or several, as a tuple.

    Raises:
        RequestError: neither a `single` nor an iterable.
    """
    if isinstance(value, single):
        return (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be one {single.__name__} or a list of them; got {value!r}")
    return tuple(plain_items(value))
