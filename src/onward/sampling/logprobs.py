"""Log-probabilities of chosen ids and of the likeliest ones."""

from typing import NamedTuple

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.ops.operators import check_no_gradient
from onward.sampling.noise import UNITS, logarithm, relative_probability, units


class Logprobs(NamedTuple):
    """chosen float32 [...]; top_ids int64 [..., k], the likeliest first and of equals the lowest id first; top
    float32 [..., k], theirs. For logits of shape [..., V].
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def logprobs(logits: Tensor, chosen: Tensor, top_k: int = 0) -> Logprobs:
    """Natural logarithms of probabilities under softmax(logits), the same bits alone or in any batch.

    Of the model's own distribution where `logits` are what it returned; of the one that was drawn from where they
    are `Sampler.scores`. An id of no probability has -inf; a row that is no distribution (it holds NaN or
    +inf, or nothing but -inf) has NaN.

    Within 5e-7 of the exact values, and the float32 rounding of a result: each e^x is good to 2.4e-7, and counting
    in units of 2^-40 adds V 2^-41 at most. Counting has no gradient: train with `torch.log_softmax`.

    Args:
        logits: float [..., V].
        chosen: int [...], ids.
        top_k: how many of the likeliest; V at most.

    Raises:
        RequestError: shapes that do not fit, an id outside the vocabulary, more alternatives than ids, or autograd
            follows the logits.
    """
    check_no_gradient("logprobs", "take torch.log_softmax(logits, -1)", logits)
    vocab = logits.shape[-1]
    if chosen.shape != logits.shape[:-1] or chosen.is_floating_point():
        raise RequestError(
            f"logprobs of logits {list(logits.shape)} wants ids of shape {list(logits.shape[:-1])}; got {chosen.dtype} "
            f"{list(chosen.shape)}"
        )
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 0 <= top_k <= vocab:
        raise RequestError(f"logprobs: top_k must be a whole number from 0 to {vocab}, the vocabulary; got {top_k!r}")
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < vocab:
        raise RequestError(
            f"logprobs: ids must be from 0 to {vocab - 1}; got {int(chosen.min())} … {int(chosen.max())}"
        )
    logits = logits.to(torch.float32)
    best = logits.amax(-1, keepdim=True)
    total = units(relative_probability(logits - best).nan_to_num(0.0)).sum(-1, keepdim=True).to(torch.float64) / UNITS
    # The likeliest id counts 1, so a smaller total is that of a row that is no distribution.
    normaliser = torch.where(best.isfinite(), best.to(torch.float64) + logarithm(total.clamp(min=1.0)), float("nan"))

    def of(ids: Tensor) -> Tensor:
        return (logits.gather(-1, ids).to(torch.float64) - normaliser).to(torch.float32)

    top_ids = _likeliest(logits.reshape(-1, vocab), top_k).view(*logits.shape[:-1], top_k)
    return Logprobs(of(chosen.to(torch.int64).unsqueeze(-1)).squeeze(-1), top_ids, of(top_ids))


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """[N, V] -> int64 [N, count]. torch.topk orders ties as it likes: here the lower id comes first."""
    if count == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    top_ids = []
    for row, least in zip(logits, logits.topk(count).values[:, -1], strict=True):
        ids = torch.nonzero(~(row < least)).squeeze(1)  # in order; NaN counts as large
        top_ids.append(ids[row[ids].sort(descending=True, stable=True).indices[:count]])
    return torch.stack(top_ids)
