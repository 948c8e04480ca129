"""Where the tokens of a forward stand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onward.models.rope import RotarySchedule


@dataclass(frozen=True)
class AttentionTemperature:
    """A factor of queries that grows with the position: 1 + beta * ln(1 + floor(position / length)).

    Llama 4's, which keeps attention sharp in long texts (`llama_4_scaling_beta` in config.json).
    """

    beta: float
    length: int


class Positions:
    """The positions of one forward's tokens, and their angles, which are computed once for each schedule.

    offsets: int32 [B], of each row's first token. every: int32 [B, T], of every token. context: the most positions that
    the model serves.
    """

    def __init__(self, tokens: Tensor, offsets: Tensor, context: int) -> None:
        self.offsets = offsets
        self.context = context
        self.every = offsets.unsqueeze(1) + torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        self._angles: dict[RotarySchedule, tuple[Tensor, Tensor]] = {}
        self._factors: dict[AttentionTemperature, Tensor] = {}

    def angles(self, schedule: RotarySchedule) -> tuple[Tensor, Tensor]:
        """cos and sin as `ops.rotate` takes them, float32 [B, T, 2R]."""
        if schedule not in self._angles:
            self._angles[schedule] = schedule.angles(self.every, self.context)
        return self._angles[schedule]

    def grown(self, q_BHTE: Tensor, growth: AttentionTemperature) -> Tensor:
        """Queries float [B, H, T, E], each times the factor of its position."""
        if growth not in self._factors:
            lengths = (self.every // growth.length).to(torch.float32)
            self._factors[growth] = (1.0 + growth.beta * torch.log(1.0 + lengths)).unsqueeze(1).unsqueeze(-1)
        return q_BHTE * self._factors[growth].to(q_BHTE.dtype)
