"""Temperature: a sharper or flatter distribution."""

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.sampling.transforms.transform import Columns, Draws, Filter
from onward.util.checks import is_finite


class TemperatureDict(TypedDict, total=False):
    temperature: float


@dataclass(frozen=True, kw_only=True)
class Temperature(Filter):
    """temperature: 0 is greedy (all filters then change nothing); 1 is the model's own distribution."""

    temperature: float = 0.0

    def check(self) -> None:
        if not (is_finite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature must be a number of 0 (greedy) or more; got {self.temperature!r}")

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
