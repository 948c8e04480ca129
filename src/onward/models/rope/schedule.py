"""The angles of rotary position embedding (arXiv 2104.09864) for every position."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onward import ops
from onward.models.rope.scaling import Dynamic, Scaling
from onward.models.rope.yarn import Yarn


@dataclass(frozen=True)
class RotarySchedule:
    """The angles of some layers: position -> cos and sin for every rotated pair.

    dims: how many features of a head turn, the first ones. base: of the inverse frequencies base ** (-2i / dims).
    scaling: what is done to these for longer texts. interleaved: pairs are (2i, 2i + 1); else (i, i + dims / 2).
    """

    dims: int
    base: float
    scaling: Scaling
    interleaved: bool = False

    def angles(self, positions: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """cos and sin as `ops.rotate` takes them, float32 [B, T, dims].

        positions: int [B, T], absolute. context: the most positions that the model serves; `LongRope` depends on it.
        """
        at = positions.to(torch.float32).unsqueeze(-1)
        inverse = self.scaling.inverse_frequencies(self.dims, self.base, at, context)
        return ops.rotary_angles(at * inverse, magnitude=self.scaling.magnitude)

    def serves_past(self, context: int) -> bool:
        """Whether it is made for texts longer than `context`, the length that a config gives."""
        scaling = self.scaling
        if isinstance(scaling, Yarn):
            return scaling.factor * scaling.original_max_position > context
        return isinstance(scaling, Dynamic)
