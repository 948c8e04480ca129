"""Temperature: a sharper or flatter distribution."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onward.sampling.transforms.transform import Columns, Draws, Filter
from onward.util.options import SAMPLING, option


@dataclass(frozen=True, kw_only=True)
class Temperature(Filter):
    """temperature: 0 is greedy (all filters then change nothing); 1 is the model's own distribution."""

    temperature: float = option(0.0, low=0, help="Sampling temperature; 0: greedy.", group=SAMPLING, flag="-t")

    def is_on(self) -> bool:
        return self.temperature > 0

    @staticmethod
    def filter(scores: Tensor, options: Columns, draws: Draws) -> Tensor:
        return apply_temperature(scores, torch.where(options["temperature"] == 0, 1.0, options["temperature"]))


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits / temperature, shifted to a largest of 0; temperature float32 [B], above 0.

    Unshifted, a temperature of 1e-38 would make the best ids infinite and equal.
    """
    best = logits.amax(-1, keepdim=True)
    return (logits - torch.where(best.isfinite(), best, 0.0)) / temperature.unsqueeze(1)
