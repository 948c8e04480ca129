"""A method of quantization, the fields of its quantization_config, and rules for per-module settings."""

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from onward.checkpoint.formats.stored import Shape, StoredWeight
from onward.errors import warn_once

# The name of a tensor below the module, such as "qweight" -> the stored tensor.
Read = Callable[[str], Tensor]
# Module -> its own settings, which override the checkpoint's.
Overrides = Callable[[str], Mapping[str, Any]]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class QuantizationMethod(NamedTuple):
    """How a module's weight is stored. tensors: the names below a module of those that may be part of it. marks: a
    module with one of these is quantized. decode: (read, the present tensors, shape) -> the weight; raises ValueError
    for invalid tensors."""

    tensors: Set[str]
    marks: Set[str]
    decode: Callable[[Read, Set[str], Shape], StoredWeight]

    def parts(self, names: Set[str]) -> Set[str]:
        """The tensors below a module that make up its weight; empty if the weight is not quantized."""
        return names & self.tensors if names & self.marks else set()


# Fields of every method. Lists of modules have no effect: modules without quantized tensors are read unchanged.
COMMON_FIELDS = words("""
quant_method modules_to_not_convert modules_to_convert llm_int8_skip_modules ignore modules_in_block_to_quantize
quantization_status run_compressed dequantize backend meta
""")


@dataclass(frozen=True)
class Fields:
    """The fields of a method's quantization_config, or of an adapter_config.json. read: they determine how tensors are
    read. refused: they would change the weights in unsupported ways, except with these values. ignored: they have no
    effect here."""

    read: frozenset[str]
    ignored: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def known(self) -> frozenset[str]:
        """All fields that the method knows, including those of every method."""
        return self.read | self.ignored | self.refused.keys() | COMMON_FIELDS

    def check(self, settings: Mapping[str, Any], where: str = "quantization_config") -> None:
        """Raise ValueError for refused fields, and warn about unknown ones. null, false and empty values are absent."""
        for name, harmless in self.refused.items():
            value = settings.get(name)
            if value and value not in harmless:
                raise ValueError(f"{name} is {value!r}, which Onward does not support")
        unknown = sorted(
            name for name, value in settings.items() if value and name not in self.known and name[:1] != "_"
        )
        if unknown:
            warn_once(f"{where} has unknown fields, which are ignored: {', '.join(unknown)}")


def group_size(settings: Mapping[str, Any], name: str) -> int | None:
    """The number of inputs that share a scale, 128 by default; None for all, which files write as -1."""
    value = settings.get(name)
    value = 128 if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
        raise ValueError(f"{name} must be a positive integer, or -1 for one group; got {value!r}")
    return None if value == -1 else value


def compiled(name: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{name}: {text!r} is not a regular expression ({error})") from error
