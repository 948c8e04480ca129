"""LongRoPE (arXiv 2402.13753)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onward.models.rope.scaling import plain_frequencies


@dataclass(frozen=True)
class LongRope:
    """Every pair's frequency divided by a factor of its own, for which a checkpoint has two lists.

    short, long: the factors of models that serve texts up to the trained length, and of those that serve longer ones.
    The choice belongs to the model and not to a token: keys that were turned by one list do not fit queries that were
    turned by the other (docs/decisions/0003-dynamic-rope.md).
    """

    kind: ClassVar[str] = "longrope"
    factor: float
    original_max_position: int
    magnitude: float
    short: tuple[float, ...]
    long: tuple[float, ...]

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        factors = self.long if context > self.original_max_position else self.short
        # Not torch.tensor: it would copy from the host in every forward.
        divisors = torch.stack([torch.full((), factor, device=at.device) for factor in factors])
        return plain_frequencies(dims, base, at) / divisors
