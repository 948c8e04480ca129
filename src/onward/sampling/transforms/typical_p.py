"""Typical sampling: ids whose surprise is close to its expected value."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onward.sampling.noise import units
from onward.sampling.transforms.transform import Columns, Draws, Filter, Probabilities, last_needed
from onward.util.options import SAMPLING, option


@dataclass(frozen=True, kw_only=True)
class TypicalP(Filter):
    """typical_p: keep the smallest set of ids of most typical surprise whose probability reaches it, in (0, 1]."""

    typical_p: float = option(
        1.0,
        above=0,
        high=1,
        help="Sample from the most typical tokens of total probability X; 1: all.",
        group=SAMPLING,
    )

    def is_on(self) -> bool:
        return self.typical_p < 1

    @staticmethod
    def filter(scores: Tensor, options: Columns, draws: Draws) -> Tensor:
        return apply_typical_p(scores, options["typical_p"])


def apply_typical_p(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Keep the smallest set of most typical ids whose probabilities sum to at least typical_p, float32 [B] in (0, 1].

    The typical ids are those whose surprise -log p is nearest to its mean, the entropy; the one that crosses the
    threshold is kept, and ids as typical as it. (Meister et al., arXiv 2202.00666)
    """
    if bool((typical_p >= 1).all()):
        return logits
    row = Probabilities.of(logits)
    surprise = -row.scores  # minus that of the most likely id, which cancels in the difference
    mean = units(row.relative * surprise.clamp(max=40.0)).sum(-1).to(torch.float64) / row.total
    distance = (surprise.to(torch.float64) - mean.unsqueeze(1)).abs()
    ordered, order = distance.sort(dim=-1)
    threshold = last_needed(ordered, row.units.gather(1, order), typical_p.to(torch.float64) * row.total)
    return row.without(logits, distance > threshold, typical_p < 1)
