"""Numbers and lists of a GGUF file's metadata, which may be of any kind."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from onward.errors import ConfigError


def number(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A number of the metadata; the default where it is none."""
    value = metadata.get(key, default)
    return value if isinstance(value, int | float) else default


def list_of(value: Any) -> list[Any] | None:
    """The values of an array; None for what is none."""
    return list(value) if isinstance(value, np.ndarray | list) else None


def each_layer(metadata: Mapping[str, Any], key: str) -> tuple[Any, list[bool] | None]:
    """The number of all layers that have one (0 says that a layer has none), and which have it. None: the metadata has
    one for all.

    Raises:
        ConfigError: two layers have different ones.
    """
    value = metadata.get(key)
    counts = list_of(value)
    if counts is None:
        return value, None
    numbers = {int(count) for count in counts if isinstance(count, int | np.integer) and count}
    if len(numbers) > 1:
        raise ConfigError(f"{key} differs from layer to layer ({sorted(numbers)[:4]}), which is not supported")
    return max(numbers, default=None), [bool(count) for count in counts]


def whole_numbers(key: str, value: Any) -> list[int] | None:
    """The numbers of an array, one for each layer; None for what is none."""
    values = list_of(value)
    if values is not None and not all(isinstance(item, int | np.integer) for item in values):
        raise ConfigError(f"{key} must be whole numbers; got {values[:4]}")
    return None if values is None else [int(item) for item in values]


def quotient(value: Any, divisor: Any) -> int:
    """Of two whole numbers; 0, which no width may be, where they are none."""
    return value // divisor if isinstance(value, int) and isinstance(divisor, int) and divisor else 0
