"""Quantize weights to 8 and 4 bits. `onward.ops.linear` multiplies with them.

small = onward.quantize(lm, "int4")
onward.quantization.quantize_folder("Qwen/Qwen3-0.6B", "qwen3-int4", "int4")    # then onward.load("qwen3-int4")
"""

from onward.quantization.folder import quantize_folder
from onward.quantization.params import Progress, TensorReport, count_matrices, quantize, quantize_params
from onward.quantization.rounding import (
    check_format,
    quantize_int4,
    quantize_int8,
    quantize_weight,
    relative_rms_error,
)

__all__ = [
    "Progress",
    "TensorReport",
    "check_format",
    "count_matrices",
    "quantize",
    "quantize_folder",
    "quantize_int4",
    "quantize_int8",
    "quantize_params",
    "quantize_weight",
    "relative_rms_error",
]
