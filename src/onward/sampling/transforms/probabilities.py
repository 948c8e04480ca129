"""Probabilities in whole units, whose sums depend on no order of adding (`onward.sampling.arithmetic`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from onward.sampling.arithmetic import relative_probability, units


class Probabilities(NamedTuple):
    """Of every id beside the row's likeliest; nothing for a row that is no distribution.

    scores float32 [B, V], logits less the largest; relative float32 [B, V] = e^scores; units int64 [B, V], the same
    in whole units; total float64 [B], their sum; sound bool [B, 1].
    """

    scores: Tensor
    relative: Tensor
    units: Tensor
    total: Tensor
    sound: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> "Probabilities":
        best = logits.amax(-1, keepdim=True)
        sound = best.isfinite()
        scores = torch.where(sound, logits - best, float("-inf"))
        relative = relative_probability(scores)
        counted = units(relative)
        return cls(scores, relative, counted, counted.sum(-1).to(torch.float64), sound)

    def without(self, logits: Tensor, dropped: Tensor, rows: Tensor) -> Tensor:
        """-inf where `dropped` [B, V], in `rows` [B]."""
        return logits.masked_fill(dropped & rows.unsqueeze(1) & self.sound, float("-inf"))


def last_needed(ordered: Tensor, counted: Tensor, mass: Tensor) -> Tensor:
    """The last [B, 1] of `ordered` before which less than `mass` [B] was counted; the first at least."""
    before = counted.cumsum(-1) - counted
    needed = (before.to(torch.float64) < mass.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, needed - 1)
