"""RMSNorm (arXiv 1910.07467), rounding to a dtype, and scalar factors."""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from onward import ops
from onward.models.architecture import WeightScope


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * (offset + weight) over the last `width` features (`ops.rms_norm`). Its params are the weight.

    after_cast: multiply after the cast to the dtype of x; by default where offset is 0. groups: the number of equal
    parts of the features that are normalised separately, without offset.
    """

    width: int
    eps: float
    offset: float = 0.0
    after_cast: bool | None = None
    groups: int = 1

    def read(self, scope: WeightScope) -> Tensor:
        return scope.take("weight", self.width)

    def __call__(self, weight: Tensor, x: Tensor) -> Tensor:
        if self.groups == 1:
            return ops.rms_norm(x, weight, eps=self.eps, offset=self.offset, after_cast=self.after_cast)
        wide = x.to(torch.float32) if self.after_cast is False else x
        parts = rms_normalize(wide.reshape(*x.shape[:-1], self.groups, -1), self.eps)
        return (parts.flatten(-2) * weight).to(x.dtype)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis: a norm without weights."""
    return ops.rms_norm(x, x.new_ones(x.shape[-1]), eps=eps)


def read_norm(norm: RMSNorm | None, scope: WeightScope) -> Tensor | None:
    return None if norm is None else norm.read(scope)


def rounded(number: float, dtype: torch.dtype) -> float:
    """A positive number rounded to `dtype`, without a tensor, whose value a trace could not read."""
    if dtype == torch.float16:
        return float(struct.unpack("e", struct.pack("e", number))[0])
    bits = int(struct.unpack("I", struct.pack("f", number))[0])
    if dtype == torch.bfloat16:  # the upper half of a float32; ties go to even
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("f", struct.pack("I", bits))[0])


def multiplied(x: Tensor, factor: float) -> Tensor:
    """x * factor; x itself for a factor of 1."""
    return x if factor == 1.0 else x * factor
