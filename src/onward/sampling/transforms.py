"""Filters over float32 logits [B, V]; what a row must not draw becomes -inf.

Each sees what the one before left, in the order of docs/sampling.md: temperature, top_k, top_p, min_p, typical_p,
XTC. Every filter is a threshold on a row's values, so ids that tie with the threshold are all kept: the result
depends on no sorting order. Sums of probabilities are sums of integers (`onward.sampling.arithmetic`), so it depends
on no order of adding either. Parameters are tensors [B], one value a row. A row whose largest logit is NaN or
infinite is returned as it is, with its marks where they were, for the caller to find.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onward.sampling.arithmetic import logarithm, relative_probability, units

# Most nuclei are narrow: look among this many of the likeliest ids before sorting the whole vocabulary.
_NUCLEUS_GUESS = 1024


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits / temperature, shifted to a largest of 0; temperature float32 [B], above 0.

    Unshifted, a temperature of 1e-38 would make the best ids infinite and equal.
    """
    best = logits.amax(-1, keepdim=True)
    return (logits - torch.where(best.isfinite(), best, 0.0)) / temperature.unsqueeze(1)


def apply_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep ids whose logit is at least the row's k-th largest; top_k int64 [B], 0 keeps all."""
    vocab = logits.shape[-1]
    widest = min(int(top_k.max()), vocab)
    if widest == 0:
        return logits
    largest = logits.topk(widest, dim=-1).values
    kth = largest.gather(1, (top_k.clamp(1, widest) - 1).unsqueeze(1))
    off = (top_k == 0).unsqueeze(1)
    return logits.masked_fill((logits < kth) & ~off, float("-inf"))


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of likeliest ids whose probabilities sum to at least top_p; top_p float32 [B] in (0, 1].

    The id that crosses the threshold is kept, so at least one is. (Holtzman et al., arXiv 1904.09751)
    """
    if bool((top_p >= 1).all()):
        return logits
    row = _Probabilities.of(logits)
    wanted = top_p.to(torch.float64) * row.total
    ordered = row.relative.topk(min(_NUCLEUS_GUESS, logits.shape[-1]), dim=-1).values
    if bool((units(ordered).sum(-1).to(torch.float64) < wanted).any()):
        ordered = row.relative.sort(dim=-1, descending=True).values
    threshold = _last_needed(ordered, units(ordered), wanted)
    return row.without(logits, row.relative < threshold, top_p < 1)


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep ids at least min_p times as likely as the row's likeliest; min_p float32 [B] in [0, 1].

    (Nguyen et al., arXiv 2407.01082)
    """
    floor = logits.amax(-1, keepdim=True) + lowest_score(min_p).unsqueeze(1)
    return logits.masked_fill(logits < floor, float("-inf"))


def lowest_score(min_p: Tensor) -> Tensor:
    """p >= min_p * p_max, in logits: how far below the best an id may lie. float32 [B]; -inf for 0, all may."""
    # float32's least value stands in for 0, which has no logarithm.
    logs = logarithm(min_p.to(torch.float64).clamp(min=1e-45)).to(torch.float32)
    return torch.where(min_p > 0, logs, float("-inf"))


def apply_typical_p(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Keep the smallest set of most typical ids whose probabilities sum to at least typical_p, float32 [B] in (0, 1].

    The typical ids are those whose surprise -log p is nearest to its mean, the entropy; the one that crosses the
    threshold is kept, and ids as typical as it. (Meister et al., arXiv 2202.00666)
    """
    if bool((typical_p >= 1).all()):
        return logits
    row = _Probabilities.of(logits)
    surprise = -row.scores  # less that of the likeliest id, which drops out of the difference
    mean = units(row.relative * surprise.clamp(max=40.0)).sum(-1).to(torch.float64) / row.total
    distance = (surprise.to(torch.float64) - mean.unsqueeze(1)).abs()
    ordered, order = distance.sort(dim=-1)
    threshold = _last_needed(ordered, row.units.gather(1, order), typical_p.to(torch.float64) * row.total)
    return row.without(logits, distance > threshold, typical_p < 1)


def apply_xtc(logits: Tensor, threshold: Tensor, active: Tensor) -> Tensor:
    """Exclude top choices: of the ids at least as probable as `threshold`, keep the least probable only.

    Where one id or none reaches the threshold nothing changes, and of ids that tie as the least probable all are
    kept. (P. E. Weidmann, text-generation-webui pull request 6335)

    Args:
        threshold: float32 [B] in (0, 0.5].
        active: bool [B], how the coin of this position fell (`onward.sampling.noise.coins` < the row's probability).
    """
    row = _Probabilities.of(logits)
    top = row.units.to(torch.float64) >= (threshold.to(torch.float64) * row.total).unsqueeze(1)
    least = row.relative.masked_fill(~top, float("inf")).amin(-1, keepdim=True)
    return row.without(logits, top & (row.relative > least), active)


class _Probabilities(NamedTuple):
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
    def of(cls, logits: Tensor) -> "_Probabilities":
        best = logits.amax(-1, keepdim=True)
        sound = best.isfinite()
        scores = torch.where(sound, logits - best, float("-inf"))
        relative = relative_probability(scores)
        counted = units(relative)
        return cls(scores, relative, counted, counted.sum(-1).to(torch.float64), sound)

    def without(self, logits: Tensor, dropped: Tensor, rows: Tensor) -> Tensor:
        """-inf where `dropped` [B, V], in `rows` [B]."""
        return logits.masked_fill(dropped & rows.unsqueeze(1) & self.sound, float("-inf"))


def _last_needed(ordered: Tensor, counted: Tensor, wanted: Tensor) -> Tensor:
    """The last [B, 1] of `ordered` before which less than `wanted` [B] was counted; the first at least."""
    before = counted.cumsum(-1) - counted
    needed = (before.to(torch.float64) < wanted.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, needed - 1)
