"""Log-probabilities of chosen and likeliest ids, tokens with their log-probabilities, and checks of logits and ids."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onward.errors import OnwardError, RequestError
from onward.ops.operator import check_no_gradient
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
            f"logprobs of logits {list(logits.shape)} expects ids of shape {list(logits.shape[:-1])}; got "
            f"{chosen.dtype} {list(chosen.shape)}"
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


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities under the model's own distribution.

    chosen: the logprob of the token itself. top: (id, logprob) of the likeliest ids, best first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


class Token(NamedTuple):
    """An id that a step emitted, with its logprobs where the request asks for them."""

    id: int
    logprobs: TokenLogprobs | None = None


def token_logprobs(ids: Sequence[int], logits: Tensor, top: int) -> list[TokenLogprobs]:
    """The logprobs of ids [N], each under its row of logits [N, V], and of the `top` likeliest ids of that row."""
    batch = logprobs(logits, torch.tensor(ids, dtype=torch.int64, device=logits.device), top)
    return [
        TokenLogprobs(chosen, tuple(zip(top_ids, top, strict=True)))
        for chosen, top_ids, top in zip(batch.chosen.tolist(), batch.top_ids.tolist(), batch.top.tolist(), strict=True)
    ]


def tokens_of(ids: Sequence[int], logits: Tensor, tops: Sequence[int | None]) -> list[Token]:
    """Tokens of ids [N] under logits [N, V]. tops: how many of the likeliest ids each reports; None reports nothing."""
    asked = set(tops)
    if asked == {None}:
        return [Token(token) for token in ids]
    reports: list[TokenLogprobs | None] = [None] * len(ids)
    for top in asked - {None}:
        assert top is not None
        places = [place for place, of_row in enumerate(tops) if of_row == top]
        rows = logits if len(places) == len(ids) else logits[places]
        for place, report in zip(places, token_logprobs([ids[place] for place in places], rows, top), strict=True):
            reports[place] = report
    return [Token(*pair) for pair in zip(ids, reports, strict=True)]


def checked_ids(picked: Tensor, logits: Tensor) -> list[int]:
    """The ids picked from logits [B, V], as a list on the host.

    Only the picked logits are checked for NaN. That finds a NaN anywhere in a row, for NaN wins every argmax.

    Raises:
        RequestError: ids of another shape or dtype, or outside the vocabulary. OnwardError: logits that are not finite.
    """
    if picked.shape != logits.shape[:1] or picked.is_floating_point():
        raise RequestError(
            f"select must return integer ids of shape {list(logits.shape[:1])}; got {picked.dtype} {list(picked.shape)}"
        )
    ids: list[int] = picked.tolist()
    vocab = logits.shape[1]
    if out := [token for token in ids if not 0 <= token < vocab]:
        raise RequestError(f"select returned id {out[0]}, but the logits are of ids from 0 to {vocab - 1}")
    at_picked = (
        [logits[0, ids[0]].item()] if len(ids) == 1 else logits.gather(1, picked.long().unsqueeze(1))[:, 0].tolist()
    )
    if not all(map(math.isfinite, at_picked)):
        raise not_finite()
    return ids


def not_finite() -> OnwardError:
    return OnwardError(
        "the model returned logits that are NaN or infinite where a token was picked: look for "
        "overflow (float16?), damaged weights or an uninitialised cache"
    )
