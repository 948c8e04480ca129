"""Root mean square normalisation (arXiv 1910.07467) with a weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onward import ops
from onward.models.scope import Scope


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * (offset + weight) over the last `width` features (`ops.rms_norm`). Its params are the weight.

    after_cast: multiply after the cast to the dtype of x; by default where offset is 0. groups: how many parts of the
    features, all of one width, have a mean square each; their weight is not offset.
    """

    width: int
    eps: float
    offset: float = 0.0
    after_cast: bool | None = None
    groups: int = 1

    def read(self, scope: Scope) -> Tensor:
        return scope.take("weight", self.width)

    def __call__(self, weight: Tensor, x: Tensor) -> Tensor:
        if self.groups > 1:
            return self._by_group(weight, x)
        return ops.rms_norm(x, weight, eps=self.eps, offset=self.offset, after_cast=self.after_cast)

    def _by_group(self, weight: Tensor, x: Tensor) -> Tensor:
        wide = x.to(torch.float32) if self.after_cast is False else x
        parts = over_rms(wide.reshape(*x.shape[:-1], self.groups, -1), self.eps)
        return (parts.flatten(-2) * weight).to(x.dtype)


def over_rms(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis: a norm that has learned nothing."""
    return ops.rms_norm(x, x.new_ones(x.shape[-1]), eps=eps)
