"""Weights that others quantized, in the Hugging Face layout: kept in their bits or read into floats, one file a method.

A method is chosen by `quantization_config` of config.json. It says which tensors stand for the weight of a module, and
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
