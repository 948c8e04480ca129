"""Weights that others quantized, in the Hugging Face layout: kept in their bits or read into floats, one file a method.

A method is chosen by `quantization_config` of config.json. It says which tensors stand for the weight of a module, and
computes the weight [N, K] in float32 from them.
"""

from onward.checkpoint.quantizers.method import Method, Read, method_of
from onward.checkpoint.quantizers.mxfp4 import Mxfp4

__all__ = ["Method", "Mxfp4", "Read", "method_of"]
