"""YaRN (arXiv 2309.00071)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onward.models.rope.scaling import plain_frequencies


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1: what YaRN multiplies queries and keys by in texts `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Yarn:
    """Pairs that turn often within the trained length keep their frequency, those that turn seldom are divided by
    `factor`, with a ramp between.

    fast, slow: the turns within the trained length where the ramp begins and where it ends ("beta_fast" and
    "beta_slow"). truncate: whether the ramp begins and ends at whole pairs. mscale_all_dim: of the
    config, which multi-head latent attention reads.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_position: int
    magnitude: float
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        inverse = plain_frequencies(dims, base, at)
        low, high = self._ramp(dims, base)
        pairs = torch.arange(dims // 2, device=at.device, dtype=torch.float32)
        divided = ((pairs - low) / (high - low)).clamp(0, 1)
        return inverse / self.factor * divided + inverse * (1 - divided)

    def _ramp(self, dims: int, base: float) -> tuple[float, float]:
        """The pairs between which frequencies go over from kept to divided."""
        low, high = (self._pair_that_turns(turns, dims, base) for turns in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        return low, high if high != low else high + 0.001

    def _pair_that_turns(self, turns: float, dims: int, base: float) -> float:
        """The pair, as a fraction, that turns so often within the trained length."""
        return dims * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))
