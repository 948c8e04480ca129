"""Root mean square normalisation (arXiv 1910.07467) with a weight."""

from dataclasses import dataclass

from torch import Tensor

from onward import ops
from onward.models.scope import Scope


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * (offset + weight) over the last `width` features (`ops.rms_norm`). Its params are the weight.

    after_cast: multiply after the cast to the dtype of x; by default where offset is 0.
    """

    width: int
    eps: float
    offset: float = 0.0
    after_cast: bool | None = None

    def read(self, scope: Scope) -> Tensor:
        return scope.take("weight", self.width)

    def __call__(self, weight: Tensor, x: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, eps=self.eps, offset=self.offset, after_cast=self.after_cast)


def over_rms(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis: a norm that has learned nothing."""
    return ops.rms_norm(x, x.new_ones(x.shape[-1]), eps=eps)
