"""The fields of a quantization_config, and rules by which modules have settings of their own."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from onward.errors import warn_once

# The name of a tensor below the module, such as "qweight" -> the tensor as it is stored.
Read = Callable[[str], Tensor]
# Settings of one module over those of the checkpoint; empty where it has none.
Overrides = Callable[[str], Mapping[str, Any]]

# Fields of every method: modules without quantized tensors are read as they are stored, whatever these lists say.
OF_ALL_METHODS = {
    *("quant_method", "modules_to_not_convert", "modules_to_convert", "llm_int8_skip_modules", "ignore"),
    *("modules_in_block_to_quantize", "quantization_status", "run_compressed", "dequantize", "backend", "meta"),
}


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Fields:
    """The fields of a method's quantization_config. read: they decide how tensors are read. refused: they would change
    the weights in ways Onward does not have, but for these values. idle: they change nothing here."""

    read: frozenset[str]
    idle: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for a refused field, and warn of unknown ones. null, false and empty values are absent."""
        for name, harmless in self.refused.items():
            value = settings.get(name)
            if value and value not in harmless:
                raise ValueError(f"{name} is {value!r}, which Onward does not have")
        known = known_fields(self)
        unknown = sorted(name for name, value in settings.items() if value and name not in known and name[:1] != "_")
        if unknown:
            warn_once(
                f"quantization_config has fields that Onward does not know ({', '.join(unknown)}): the weights are "
                "read as if they were not there"
            )


def known_fields(fields: Fields) -> frozenset[str]:
    """All fields that a method knows, those of every method included."""
    return fields.read | fields.idle | fields.refused.keys() | OF_ALL_METHODS


def size(settings: Mapping[str, Any], name: str, default: int) -> int | None:
    """How many inputs share a scale; None for all, which files write as -1."""
    value = settings.get(name, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
        raise ValueError(f"{name} must be a whole number above 0, or -1 for one group; got {value!r}")
    return None if value == -1 else value


def pattern_of(name: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{name}: {text!r} is not a regular expression ({error})") from error
