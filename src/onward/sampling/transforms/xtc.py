"""XTC: exclude top choices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onward.sampling.transforms.transform import Columns, Draws, Filter, Probabilities, check_switch
from onward.util.options import SAMPLING, option


@dataclass(frozen=True, kw_only=True)
class Xtc(Filter):
    """xtc_probability, xtc_threshold: exclude top choices. With this probability, at each position, of the ids at least
    as probable as the threshold, in (0, 0.5], only the least probable is kept.
    """

    xtc_probability: float = option(
        0.0, low=0, high=1, help="Probability of dropping all top choices but the last (XTC).", group=SAMPLING
    )
    xtc_threshold: float = option(
        0.1,
        above=0,
        high=0.5,
        hint=" (no two ids are above one half)",
        help="Minimum probability of a top choice (XTC).",
        group=SAMPLING,
    )

    def check(self) -> None:
        check_switch(self, Xtc, "xtc_probability")

    def is_on(self) -> bool:
        return self.xtc_probability > 0

    @staticmethod
    def filter(scores: Tensor, options: Columns, draws: Draws) -> Tensor:
        return apply_xtc(scores, options["xtc_threshold"], draws.coins() < options["xtc_probability"])


def apply_xtc(logits: Tensor, threshold: Tensor, active: Tensor) -> Tensor:
    """Exclude top choices: of the ids at least as probable as `threshold`, keep the least probable only.

    If fewer than two ids reach the threshold nothing changes; ids that tie as the least probable are all kept. (P. E.
    Weidmann, text-generation-webui pull request 6335)

    Args:
        threshold: float32 [B] in (0, 0.5].
        active: bool [B], whether to apply it at this position (`onward.sampling.noise.coins` < the row's probability).
    """
    row = Probabilities.of(logits)
    top = row.units.to(torch.float64) >= (threshold.to(torch.float64) * row.total).unsqueeze(1)
    least = row.relative.masked_fill(~top, float("inf")).amin(-1, keepdim=True)
    return row.without(logits, top & (row.relative > least), active)
