"""The table of methods, and the one that a config.json names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from onward.checkpoint.formats import auto_round, awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4, torchao
from onward.checkpoint.formats.settings import Overrides, Read
from onward.checkpoint.shards import read_object
from onward.errors import ConfigError
from onward.ops import QuantizedWeight

# AutoGPTQ's, and AutoAWQ's of before config.json had a quantization_config.
SETTINGS_FILES = ("quantize_config.json", "quant_config.json")
_OF_AWQ = {"w_bit", "q_group_size", "zero_point"}


def with_settings_file(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with a quantization_config from such a file, where it has none of its own."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, Mapping) else {})
    file = next((folder / name for name in SETTINGS_FILES if (folder / name).is_file()), None)
    if file is None or any(part.get(field) is not None for part in parts for field in FIELDS_OF_METHODS):
        return dict(config)
    settings = read_object(file, ConfigError)
    method = "awq" if _OF_AWQ & settings.keys() else "gptq"
    return {**config, "quantization_config": {"quant_method": method} | settings}


# Where a config.json says how others quantized the weights.
FIELDS_OF_METHODS = ("quantization_config", "compression_config")


class QuantizationMethod(Protocol):
    """How weights were quantized."""

    def parts(self, names: set[str]) -> set[str]:
        """Which of the tensors below a module stand for its weight; empty where the weight is there as it is."""
        ...

    def weight(self, read: Read, names: set[str], shape: tuple[int, int]) -> Tensor:
        """float32 [N, K]: the weight that the tensors `names` stand for. Raises ValueError with what does not fit."""
        ...

    def as_quantized(
        self, read: Read, names: set[str], shape: tuple[int, int], dtype: torch.dtype
    ) -> QuantizedWeight | None:
        """The same weight in the bits that it has, standing for one of `dtype`; None where no format of ours holds it
        without loss (`onward.checkpoint.formats.repack`)."""
        ...


@dataclass(frozen=True)
class Methods:
    """How the weights of each module were quantized. name: the quant_method. settings: of modules that overrides
    lack."""

    name: str
    settings: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], QuantizationMethod]
    overrides: Overrides

    def of(self, module: str) -> QuantizationMethod:
        """The method of a module, by its name in the checkpoint."""
        return self.read({**self.settings, **self.overrides(module)})


_METHODS: dict[str, Callable[[Mapping[str, Any]], QuantizationMethod]] = {
    "awq": awq.read_method,
    "gptq": gptq.read_method,
    "auto-round": auto_round.read_method,
    "compressed-tensors": compressed_tensors.read_method,
    "fp8": fp8.read_method,
    "bitsandbytes": bitsandbytes.read_method,
    "mxfp4": mxfp4.read_method,
    "torchao": torchao.read_method,
}
_OVERRIDES: dict[str, Callable[[Mapping[str, Any]], Overrides]] = {
    "gptq": gptq.read_overrides,
    "auto-round": auto_round.read_overrides,
}
_OTHER_NAMES = {
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "fbgemm_fp8": "fp8",
}


def _settings(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The name and the value of the field that says how weights were quantized: of the config or of its text part."""
    text = config.get("text_config")
    for part, prefix in ((config, ""), (text if isinstance(text, Mapping) else {}, "text_config.")):
        for field in FIELDS_OF_METHODS:
            if part.get(field) is not None:
                return prefix + field, part[field]
    return None


def methods_of(config: Mapping[str, Any]) -> Methods | None:
    """The methods of a config.json; None where it names none, `ConfigError` where Onward does not have them."""
    found = _settings(config)
    if found is None:
        return None
    field, settings = found
    if not isinstance(settings, Mapping):
        raise ConfigError(f"config.json: {field} must be an object; got {settings!r}: take the unquantized checkpoint")
    given = settings.get("quant_method")
    name = _OTHER_NAMES.get(given, given) if isinstance(given, str) else None
    if name not in _METHODS:
        raise ConfigError(
            f"config.json: {field} has the quant_method {given!r}, which cannot be read; {', '.join(_METHODS)} can: "
            "take the unquantized checkpoint"
        )
    try:
        _METHODS[name](settings)
        overrides = _OVERRIDES[name](settings) if name in _OVERRIDES else lambda module: {}
    except ValueError as error:
        raise ConfigError(f"config.json: {field}: {error}: take the unquantized checkpoint") from error
    return Methods(name, settings, _METHODS[name], overrides)
