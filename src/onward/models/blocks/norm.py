"""Root mean square normalisation (arXiv 1910.07467) with a weight."""

from dataclasses import dataclass

from torch import Tensor

from onward import ops
from onward.models.scope import Scope


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * (offset + weight) over the last `width` features (`ops.rms_norm`). Its params are the weight."""

    width: int
    eps: float
    offset: float = 0.0

    def read(self, scope: Scope) -> Tensor:
        return scope.take("weight", self.width)

    def __call__(self, weight: Tensor, x: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, eps=self.eps, offset=self.offset)
