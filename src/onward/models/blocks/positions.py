"""Where the tokens of a forward stand."""

import torch
from torch import Tensor

from onward.models.rope import RotarySchedule


class Positions:
    """The positions of one forward's tokens, and their angles, which are computed once for each schedule.

    offsets: int32 [B], of each row's first token. every: int32 [B, T], of every token.
    """

    def __init__(self, tokens: Tensor, offsets: Tensor) -> None:
        self.offsets = offsets
        self.every = offsets.unsqueeze(1) + torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        self._angles: dict[RotarySchedule, tuple[Tensor, Tensor]] = {}

    def angles(self, schedule: RotarySchedule) -> tuple[Tensor, Tensor]:
        """cos and sin as `ops.rotate` takes them, float32 [B, T, 2R]."""
        if schedule not in self._angles:
            self._angles[schedule] = schedule.angles(self.every)
        return self._angles[schedule]
