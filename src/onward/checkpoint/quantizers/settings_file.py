"""The file beside config.json in which older libraries say how weights were quantized."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.checkpoint.quantizers.method import FIELDS_OF_METHODS
from onward.errors import ConfigError, one_line
from onward.text_input import read_json_file

# AutoGPTQ's, and AutoAWQ's of before config.json had a quantization_config.
SETTINGS_FILES = ("quantize_config.json", "quant_config.json")
_OF_AWQ = {"w_bit", "q_group_size", "zero_point"}


def with_settings_file(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with a quantization_config from such a file, where it has none of its own.

    Raises:
        ConfigError: the file holds no JSON object.
    """
    text = config.get("text_config")
    parts = (config, text if isinstance(text, Mapping) else {})
    file = next((folder / name for name in SETTINGS_FILES if (folder / name).is_file()), None)
    if file is None or any(part.get(field) is not None for part in parts for field in FIELDS_OF_METHODS):
        return dict(config)
    try:
        settings = read_json_file(file)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {one_line(error)}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} must hold a JSON object; got {type(settings).__name__}")
    method = "awq" if _OF_AWQ & settings.keys() else "gptq"
    return {**config, "quantization_config": {"quant_method": method} | settings}
