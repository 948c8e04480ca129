"""The positions of the tokens in one forward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onward.models.rope import RotarySchedule


@dataclass(frozen=True)
class AttentionTemperature:
    """A factor of queries by position: 1 + beta * ln(1 + floor(position / length)). It comes from Llama 4 and keeps
    attention sharp in long texts (`llama_4_scaling_beta` in config.json)."""

    beta: float
    length: int


class Positions:
    """The positions of one forward pass, and the RoPE angles, computed once per schedule. offsets: int32 [B], of each
    row's first token. every: int32 [B, T], of every token. context: the model's max_seq_len."""

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

    def scaled_by_position(self, q_BHTE: Tensor, growth: AttentionTemperature) -> Tensor:
        """Queries float [B, H, T, E], each multiplied by the factor of its position."""
        if growth not in self._factors:
            lengths = (self.every // growth.length).to(torch.float32)
            self._factors[growth] = (1.0 + growth.beta * torch.log(1.0 + lengths)).unsqueeze(1).unsqueeze(-1)
        return q_BHTE * self._factors[growth].to(q_BHTE.dtype)
