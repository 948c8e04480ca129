"""Numbers and lists of a GGUF file's metadata, which may be of any kind."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from onward.errors import ConfigError

# How the keys end whose numbers are no whole ones.
FRACTIONS = (
    *("epsilon", "scale", "softcapping", "factor", "freq_base", "freq_base_swa", "scale_linear", "alpha"),
    *("log_multiplier", "beta_fast", "beta_slow", "max_alibi_bias", "clamp_kqv"),
)
# Keys that are true or false; some files store them as 0 and 1.
_FLAGS = ("expert_weights_norm", "rope.scaling.finetuned", "attention.causal", "use_parallel_residual")


class Keys(Mapping[str, Any]):
    """The metadata behind "{architecture}.", which remembers the keys that were looked up.

    A value reads alike in every numeric type: a count is an int, a fraction a float, and a flag may be 0 or 1.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.prefix = prefix = f"{metadata['general.architecture']}."
        names = [key.removeprefix(prefix) for key in metadata if key.startswith(prefix)]
        self._values = {name: _plain(name, metadata[prefix + name]) for name in names}
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def read(self) -> frozenset[str]:
        """The keys that were looked up, whether or not the file has them."""
        return frozenset(self._read)

    @property
    def unread(self) -> dict[str, Any]:
        """The file's other keys."""
        return {key: value for key, value in self._values.items() if key not in self._read}


def _plain(key: str, value: Any) -> Any:
    if not isinstance(value, int | float):
        return value
    if key in _FLAGS and value in (0, 1):
        return bool(value)
    if key.endswith(FRACTIONS):
        return value if isinstance(value, bool) else float(value)
    # Beyond 2**53 not every whole number is a float.
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


def number(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A number of the metadata, which may be given for each layer; the default where the file does not have the key.

    Raises:
        ConfigError: it is none, or not the same in all layers.
    """
    value = same_everywhere(metadata.get(key, default), key)
    if value is not default and not isinstance(value, int | float):
        raise ConfigError(f"{key} must be a number; got {value!r}")
    return value


def same_everywhere(value: Any, what: str, *, some_have_none: bool = False) -> Any:
    """A number for all layers; some files list it for each. some_have_none: 0 says that a layer has none.

    Raises:
        ConfigError: two layers have different ones.
    """
    if not isinstance(value, np.ndarray):
        return value
    numbers = set(value.tolist())
    if some_have_none and len(numbers) > 1:
        numbers.discard(0)
    if len(numbers) != 1:
        raise ConfigError(f"{what} differs from layer to layer ({sorted(numbers)[:4]}), which is not supported")
    return numbers.pop()


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
