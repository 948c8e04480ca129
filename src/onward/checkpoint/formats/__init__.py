"""Hugging Face weights that another library quantized: repacked or dequantized, one module per method.

`quantization_config` in config.json selects the method. The method knows which tensors hold the weight of a module, and
decodes the weight [N, K] from them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.checkpoint.formats import bitsandbytes, compressed_tensors, fp8, gptq, mxfp4, torchao
from onward.checkpoint.formats.settings import Overrides, QuantizationMethod
from onward.checkpoint.shards import read_object
from onward.errors import ConfigError

# From AutoGPTQ, and from AutoAWQ before config.json had a quantization_config.
SETTINGS_FILES = ("quantize_config.json", "quant_config.json")
_AWQ_FIELDS = {"w_bit", "q_group_size", "zero_point"}
# Fields of config.json that describe another library's quantization.
FIELDS_OF_METHODS = ("quantization_config", "compression_config")


def with_settings_file(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, with a quantization_config from a settings file if it has none of its own."""
    file = next((folder / name for name in SETTINGS_FILES if (folder / name).is_file()), None)
    if file is None or _settings(config) is not None:
        return dict(config)
    settings = read_object(file, ConfigError)
    method = "awq" if _AWQ_FIELDS & settings.keys() else "gptq"
    return {**config, "quantization_config": {"quant_method": method} | settings}


@dataclass(frozen=True)
class Methods:
    """The quantization of each module. name: the quant_method. settings: the defaults. overrides: per module."""

    name: str
    settings: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], QuantizationMethod]
    overrides: Overrides

    def of(self, module: str) -> QuantizationMethod:
        """The method for a module, by its name in the checkpoint."""
        return self.read({**self.settings, **self.overrides(module)})


_METHODS: dict[str, Callable[[Mapping[str, Any]], QuantizationMethod]] = {
    "awq": gptq.read_awq,
    "gptq": gptq.read_method,
    "auto-round": gptq.read_auto_round,
    "compressed-tensors": compressed_tensors.read_method,
    "fp8": fp8.read_method,
    "bitsandbytes": bitsandbytes.read_method,
    "mxfp4": mxfp4.read_method,
    "torchao": torchao.read_method,
}
_OVERRIDES: dict[str, Callable[[Mapping[str, Any]], Overrides]] = {
    "gptq": gptq.read_overrides,
    "auto-round": gptq.read_auto_round_overrides,
}
_OTHER_NAMES = {
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "fbgemm_fp8": "fp8",
}


def _settings(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The name and value of the first field that describes quantization, in the config or its text_config."""
    text = config.get("text_config")
    for part, prefix in ((config, ""), (text if isinstance(text, Mapping) else {}, "text_config.")):
        for field in FIELDS_OF_METHODS:
            if part.get(field) is not None:
                return prefix + field, part[field]
    return None


def methods_of(config: Mapping[str, Any]) -> Methods | None:
    """The quantization methods for a config.json; None if it has none, `ConfigError` if it is not supported."""
    if (entry := _settings(config)) is None:
        return None
    field, settings = entry
    if not isinstance(settings, Mapping):
        raise ConfigError(f"config.json: {field} must be an object; got {settings!r}: use the unquantized checkpoint")
    method = settings.get("quant_method")
    name = _OTHER_NAMES.get(method, method) if isinstance(method, str) else None
    if name not in _METHODS:
        raise ConfigError(
            f"config.json: {field} has the unsupported quant_method {method!r}; supported are {', '.join(_METHODS)}: "
            "use the unquantized checkpoint"
        )
    try:
        _METHODS[name](settings)
        overrides = _OVERRIDES[name](settings) if name in _OVERRIDES else lambda module: {}
    except ValueError as error:
        raise ConfigError(f"config.json: {field}: {error}: use the unquantized checkpoint") from error
    return Methods(name, settings, _METHODS[name], overrides)
