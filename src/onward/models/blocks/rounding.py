"""Numbers as a dtype has them, and factors."""

import struct

import torch
from torch import Tensor


def rounded(number: float, dtype: torch.dtype) -> float:
    """The value of `dtype` next to a positive number. No tensor is read for it, which a trace would not let pass."""
    if dtype == torch.float16:
        return float(struct.unpack("e", struct.pack("e", number))[0])
    bits = int(struct.unpack("I", struct.pack("f", number))[0])
    if dtype == torch.bfloat16:  # the upper half of a float32; ties go to even
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("f", struct.pack("I", bits))[0])


def multiplied(x: Tensor, factor: float) -> Tensor:
    """x * factor, which is x itself where the factor is 1."""
    return x if factor == 1.0 else x * factor
