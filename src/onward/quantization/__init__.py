"""Quantize weights to 8 and 4 bits. `onward.ops.linear` multiplies with them.

small = onward.quantize(lm, "iq4_nl")
onward.language_model.quantize_folder("Qwen/Qwen3-0.6B", "qwen3-iq4", "iq4_nl")    # then onward.load("qwen3-iq4")
"""

from onward.quantization.gptq import quantize_with_feedback, relative_output_error
from onward.quantization.params import Progress, TensorReport, count_matrices, quantize_params
from onward.quantization.rounding import (
    check_format,
    quantize_int4,
    quantize_int8,
    quantize_iq4_nl,
    quantize_weight,
    relative_rms_error,
)

__all__ = [
    "Progress", "TensorReport", "check_format", "count_matrices", "quantize_int4", "quantize_int8", "quantize_iq4_nl",
    "quantize_params", "quantize_weight", "quantize_with_feedback", "relative_output_error", "relative_rms_error",
]  # fmt: skip
