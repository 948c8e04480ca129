"""Top-p: the nucleus."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onward.sampling.noise import units
from onward.sampling.transforms.transform import Columns, Draws, Filter, Probabilities, last_needed
from onward.util.options import SAMPLING, option

# Most nuclei are narrow: try this many of the most likely ids before sorting the whole vocabulary.
_NUCLEUS_GUESS = 1024


@dataclass(frozen=True, kw_only=True)
class TopP(Filter):
    """top_p: keep the smallest set of most likely ids whose probability reaches top_p, in [0, 1]; the id that crosses
    the threshold is kept, and ids that tie with it. 0 keeps the most likely id.
    """

    top_p: float = option(
        1.0,
        low=0,
        high=1,
        help="Sample from the top tokens of total probability X; 1: all, 0: the likeliest.",
        group=SAMPLING,
    )

    def is_on(self) -> bool:
        return self.top_p < 1

    @staticmethod
    def filter(scores: Tensor, options: Columns, draws: Draws) -> Tensor:
        return apply_top_p(scores, options["top_p"])


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of most likely ids whose probabilities sum to at least top_p, float32 [B] in [0, 1].

    The id that crosses the threshold is kept, so at least one is. (Holtzman et al., arXiv 1904.09751)
    """
    if bool((top_p >= 1).all()):
        return logits
    row = Probabilities.of(logits)
    mass = top_p.to(torch.float64) * row.total
    ordered = row.relative.topk(min(_NUCLEUS_GUESS, logits.shape[-1]), dim=-1).values
    if bool((units(ordered).sum(-1).to(torch.float64) < mass).any()):
        ordered = row.relative.sort(dim=-1, descending=True).values
    threshold = last_needed(ordered, units(ordered), mass)
    return row.without(logits, row.relative < threshold, top_p < 1)
