"""Log-probabilities of chosen and most likely ids, tokens with log-probabilities, and checks of logits and ids."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from onward.errors import OnwardError, RequestError
from onward.native.interface import Code, Int, Pointer, kernel
from onward.ops.kernel_calls import DTYPES
from onward.ops.operator import check_no_gradient, is_transformed, usable_library
from onward.sampling.noise import UNITS, by_rows, logarithm, relative_probability, units

# The kernel sums the units of at most this many ids in 64 bits.
_MAX_SUMMED = 2**22


# out: float64 [rows]
@kernel
def onward_log_sums(rows: Int, columns: Int, x: Pointer, dtype: Code, stride: Int, out: Pointer) -> Code: ...


class Logprobs(NamedTuple):
    """For logits [..., V]: chosen float32 [...]; top_ids int64 [..., k], the most likely first, ties by id; top float32
    [..., k], theirs."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def logprobs(logits: Tensor, chosen: Tensor, top_k: int = 0) -> Logprobs:
    """Natural logarithms of probabilities under softmax(logits), the same bits alone or in any batch.

    With the model's logits they are of its own distribution; with `Sampler.scores` of the one that tokens are sampled
    from. An id without probability has -inf; a row that is no distribution (it has NaN or +inf, or only -inf) has NaN.

    Within 5e-7 of the exact values, and the float32 rounding of a result: each e^x is accurate to 2.4e-7, and counting
    in units of 2^-40 adds V 2^-41 at most. Counting has no gradient: train with `torch.log_softmax`.

    Args:
        logits: float [..., V].
        chosen: int [...], ids.
        top_k: how many of the most likely ids to report, at most V.

    Raises:
        RequestError: shapes that don't match, an id outside the vocabulary, top_k above V, or autograd follows the
            logits.
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
    rows = logits.reshape(-1, vocab)
    normaliser = _normalisers(rows)
    top_ids = by_rows(partial(_likeliest, count=top_k), rows)

    def of(ids: Tensor) -> Tensor:
        in_float32 = rows.gather(1, ids).to(torch.float32)
        return (in_float32.to(torch.float64) - normaliser).to(torch.float32).view(*logits.shape[:-1], ids.shape[1])

    of_chosen = of(chosen.reshape(-1, 1).to(torch.int64)).squeeze(-1)
    return Logprobs(of_chosen, top_ids.view(*logits.shape[:-1], top_k), of(top_ids))


def log_softmax(logits: Tensor) -> Tensor:
    """Those of all ids: float [N, V] -> float32 [N, V], with the bits and the errors of `logprobs`."""
    return (logits.to(torch.float32).to(torch.float64) - _normalisers(logits)).to(torch.float32)


def _normalisers(logits: Tensor) -> Tensor:
    """[N, V] -> float64 [N, 1], by the kernel or by its definition."""
    library = usable_library()
    plain = logits.device.type == "cpu" and logits.dtype in DTYPES and 0 < logits.shape[-1] <= _MAX_SUMMED
    if library is None or not plain or is_transformed():
        return by_rows(_normaliser, logits)
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    out = torch.empty(len(logits), 1, dtype=torch.float64)
    status = library.onward_log_sums(
        *logits.shape, logits.data_ptr(), DTYPES[logits.dtype], logits.stride(0), out.data_ptr()
    )
    library.check(status, onward_log_sums)
    return out


def _normaliser(logits: Tensor) -> Tensor:
    """[N, V] -> the logarithm of the sum of e^logits, float64 [N, 1]; NaN for a row that is no distribution."""
    logits = logits.to(torch.float32)
    best = logits.amax(-1, keepdim=True)
    total = units(relative_probability(logits - best).nan_to_num(0.0)).sum(-1, keepdim=True).to(torch.float64) / UNITS
    # The most likely id counts 1, so only a row that is no distribution has a smaller total.
    return torch.where(best.isfinite(), best.to(torch.float64) + logarithm(total.clamp(min=1.0)), float("nan"))


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """[N, V] -> int64 [N, count], ties by id, unlike torch.topk."""
    if not count or not len(logits):
        return torch.empty(len(logits), count, dtype=torch.int64, device=logits.device)
    logits = logits.to(torch.float32)
    top_ids = []
    for row, least in zip(logits, logits.topk(count).values[:, -1], strict=True):
        ids = torch.nonzero(~(row < least)).squeeze(1)  # in order; NaN counts as large
        top_ids.append(ids[row[ids].sort(descending=True, stable=True).indices[:count]])
    return torch.stack(top_ids)


def entropies(logits: Tensor) -> Tensor:
    """The entropy of softmax(logits) in nats: float [..., V] -> float32 [...], the same bits alone or in any batch. NaN
    for a row that is no distribution.

    Within 4e-7 + V 1e-11 of the exact value, and 4e-6 times it: the errors of `logprobs` for each id, and of its score
    of at most 40, whose rounding is a relative error of e^x.
    """
    return by_rows(_entropy, logits.reshape(-1, logits.shape[-1])).view(logits.shape[:-1])


def _entropy(logits: Tensor) -> Tensor:
    logits = logits.to(torch.float32)
    best = logits.amax(-1, keepdim=True)
    surprise = (best - logits).nan_to_num(0.0).clamp(max=40.0)  # minus that of the most likely id
    relative = relative_probability(-surprise)
    total = (units(relative).sum(-1).to(torch.float64) / UNITS).clamp(min=1.0)
    mean = units(relative * surprise).sum(-1).to(torch.float64) / UNITS / total
    return torch.where(best.squeeze(-1).isfinite(), logarithm(total) + mean, float("nan")).to(torch.float32)


def support(scores: Tensor) -> Tensor:
    """How many ids are not excluded: float [..., V] -> int64 [...]."""
    return (scores > float("-inf")).sum(-1)


class DrawnLogprobs(NamedTuple):
    """Of ids under the distributions that they were drawn from. logprobs: float32. support: int64, how many ids these
    have."""

    logprobs: Tensor
    support: Tensor


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities under the model's own distribution, and under that of sampling.

    chosen: the logprob of the token itself. top: (id, logprob) of the most likely ids, best first.
    sampling: the token's logprob under the distribution that it was drawn from, after penalties, constraints,
        temperature and filters; 0 with greedy decoding. None unless requested with `sampling_logprobs`.
    support: how many ids could be drawn from that distribution.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    sampling: float | None = None
    support: int | None = None


class Token(NamedTuple):
    """An emitted id, with its logprobs if the request asks for them."""

    id: int
    logprobs: TokenLogprobs | None = None


def token_logprobs(ids: Sequence[int], logits: Tensor, top: int) -> list[TokenLogprobs]:
    """The logprobs of ids [N], each under its row of logits [N, V], and of the `top` most likely ids of that row."""
    batch = logprobs(logits, torch.tensor(ids, dtype=torch.int64, device=logits.device), top)
    return [
        TokenLogprobs(chosen, tuple(zip(top_ids, top, strict=True)))
        for chosen, top_ids, top in zip(batch.chosen.tolist(), batch.top_ids.tolist(), batch.top.tolist(), strict=True)
    ]


def tokens_of(ids: Sequence[int], logits: Tensor, tops: Sequence[int | None]) -> list[Token]:
    """Tokens of ids [N] under logits [N, V]. tops: how many of the most likely ids each reports; None for none."""
    tokens = [Token(token) for token in ids]
    for top in {top for top in tops if top is not None}:
        indices = [index for index, of_row in enumerate(tops) if of_row == top]
        rows = logits if len(indices) == len(ids) else logits[indices]
        for index, report in zip(indices, token_logprobs([ids[i] for i in indices], rows, top), strict=True):
            tokens[index] = Token(ids[index], report)
    return tokens


def checked_ids(picked: Tensor, logits: Tensor) -> list[int]:
    """The ids picked from logits [B, V], as a list on the host.

    Only the picked logits are checked for NaN: NaN wins every argmax, so this finds one anywhere in a row.

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
