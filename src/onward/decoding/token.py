"""Tokens as a step emits them, and the checks of the ids and logits that they come from."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onward.errors import OnwardError, RequestError
from onward.sampling.logprobs import logprobs


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
