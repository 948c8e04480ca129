"""The table of methods, and the one that a config.json names."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from onward.checkpoint.quantizers import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4, torchao
from onward.errors import ConfigError
from onward.ops import QuantizedWeight

# The name of a tensor below the module, such as "qweight" -> the tensor as it is stored.
Read = Callable[[str], Tensor]


class Method(Protocol):
    """How weights were quantized."""

    def parts(self, names: set[str]) -> set[str]:
        """Which of the tensors below a module stand for its weight; empty where the weight is there as it is."""
        ...

    def weight(self, read: Read, names: set[str], shape: tuple[int, int]) -> Tensor:
        """float32 [N, K]: the weight that the tensors `names` stand for. Raises ValueError with what does not fit."""
        ...

    def held(self, read: Read, names: set[str], shape: tuple[int, int], dtype: torch.dtype) -> QuantizedWeight | None:
        """The same weight in the bits that it has, standing for one of `dtype`; None where no format of ours holds it
        without loss (`onward.checkpoint.quantizers.held`)."""
        ...


_METHODS: dict[str, Callable[[Mapping[str, Any]], Method]] = {
    "awq": awq.read_method,
    "gptq": gptq.read_method,
    "compressed-tensors": compressed_tensors.read_method,
    "fp8": fp8.read_method,
    "bitsandbytes": bitsandbytes.read_method,
    "mxfp4": mxfp4.read_method,
    "torchao": torchao.read_method,
}


def method_of(config: Mapping[str, Any]) -> Method | None:
    """The method of a config.json; None where it names none.

    Raises:
        ConfigError: Onward does not have the method, or one of its settings.
    """
    field = next(
        (field for field in ("quantization_config", "compression_config") if config.get(field) is not None), None
    )
    if field is None:
        return None
    settings = config[field]
    if not isinstance(settings, Mapping):
        raise ConfigError(f"config.json: {field} must be an object; got {settings!r}: take the unquantized checkpoint")
    name = settings.get("quant_method")
    if not isinstance(name, str) or name not in _METHODS:
        raise ConfigError(
            f"config.json: {field} has the quant_method {name!r}, which cannot be read; {', '.join(_METHODS)} can: "
            "take the unquantized checkpoint"
        )
    try:
        return _METHODS[name](settings)
    except ValueError as error:
        raise ConfigError(f"config.json: {field}: {error}: take the unquantized checkpoint") from error
