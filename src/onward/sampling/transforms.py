"""Filters over float32 logits [B, V]; what a row must not draw becomes -inf.

They are applied in this order, and each sees what the one before left: temperature, top_k, top_p, min_p.
Every filter is a threshold on a row's values, so ids that tie with the threshold are all kept: the result
depends on no sorting order. Parameters are tensors [B], one value a row.
"""

import torch
from torch import Tensor

# Most nuclei are narrow: look among this many of the likeliest ids before sorting the whole vocabulary.
_NUCLEUS_GUESS = 1024


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits / temperature, shifted to a largest of 0; temperature float32 [B], above 0.

    Unshifted, a temperature of 1e-38 would make the best ids infinite and equal.
    """
    best = logits.amax(-1, keepdim=True)
    # A broken row (NaN, infinite, nothing admitted) keeps its marks where they are, for the caller to find.
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
    probs = logits.softmax(-1)
    ordered = probs.topk(min(_NUCLEUS_GUESS, probs.shape[-1]), dim=-1).values
    cumulative = ordered.cumsum(-1)
    if bool((cumulative[:, -1] < top_p).any()):
        ordered = probs.sort(dim=-1, descending=True).values
        cumulative = ordered.cumsum(-1)
    # Ids before which less than top_p has been collected; the first one always is such an id.
    kept = (cumulative - ordered < top_p.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    threshold = ordered.gather(1, kept - 1)
    off = (top_p >= 1).unsqueeze(1)
    return logits.masked_fill((probs < threshold) & ~off, float("-inf"))


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep ids at least min_p times as likely as the row's likeliest; min_p float32 [B] in [0, 1].

    (Nguyen et al., arXiv 2407.01082)
    """
    # p >= min_p * p_max, in logits; log(0) = -inf keeps all.
    floor = logits.amax(-1, keepdim=True) + min_p.log().unsqueeze(1)
    return logits.masked_fill(logits < floor, float("-inf"))
