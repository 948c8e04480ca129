"""Min-p: ids that are at least a fraction as likely as the most likely."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onward.sampling.noise import logarithm
from onward.sampling.transforms.transform import Columns, Draws, Filter
from onward.util.options import SAMPLING, option


@dataclass(frozen=True, kw_only=True)
class MinP(Filter):
    """min_p: keep ids at least min_p times as likely as the most likely one, in [0, 1]."""

    min_p: float = option(
        0.0, low=0, high=1, help="Drop tokens below X times the top probability; 0: none.", group=SAMPLING
    )

    def is_on(self) -> bool:
        return self.min_p > 0

    @staticmethod
    def filter(scores: Tensor, options: Columns, draws: Draws) -> Tensor:
        return apply_min_p(scores, options["min_p"])


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep ids at least min_p times as likely as the row's most likely one; min_p float32 [B] in [0, 1] (Nguyen et al.,
    arXiv 2407.01082)."""
    floor = logits.amax(-1, keepdim=True) + lowest_score(min_p).unsqueeze(1)
    return logits.masked_fill(logits < floor, float("-inf"))


def lowest_score(min_p: Tensor) -> Tensor:
    """log(min_p): how far an id's logit may be below the largest. float32 [B]; -inf for 0."""
    # 0 has no logarithm: use float32's smallest number.
    logs = logarithm(min_p.to(torch.float64).clamp(min=1e-45)).to(torch.float32)
    return torch.where(min_p > 0, logs, float("-inf"))
