"""XTC: exclude top choices."""

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.sampling.transforms.transform import Columns, Draws, Filter, Probabilities, check_switch
from onward.util.checks import is_number


class XtcDict(TypedDict, total=False):
    xtc_probability: float
    xtc_threshold: float


@dataclass(frozen=True, kw_only=True)
class Xtc(Filter):
    """xtc_probability, xtc_threshold: exclude top choices. With this probability, at each position, of the ids at least
    as probable as the threshold, in (0, 0.5], only the least probable is kept.
    """

    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1

    def check(self) -> None:
        if not (is_number(self.xtc_probability) and 0 <= self.xtc_probability <= 1):
            raise RequestError(f"xtc_probability must be in [0, 1]; got {self.xtc_probability!r}")
        if not (is_number(self.xtc_threshold) and 0 < self.xtc_threshold <= 0.5):
            raise RequestError(
                f"xtc_threshold must be in (0, 0.5]; got {self.xtc_threshold!r} (no two ids are above one half)"
            )
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
