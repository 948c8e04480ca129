"""Hugging Face weights that another library quantized: repacked or dequantized, one module per method.

`quantization_config` in config.json selects the method. The method knows which tensors hold the weight of a module, and
computes the weight [N, K] in float32 from them.
"""

from onward.checkpoint.formats.method import (
    FIELDS_OF_METHODS,
    SETTINGS_FILES,
    Methods,
    QuantizationMethod,
    methods_of,
    with_settings_file,
)

__all__ = [
    "FIELDS_OF_METHODS",
    "SETTINGS_FILES",
    "Methods",
    "QuantizationMethod",
    "methods_of",
    "with_settings_file",
]
