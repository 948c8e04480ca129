"""The gated delta rule (Yang et al., arXiv 2412.06464).

Shapes: B rows, T tokens, G key heads, H value heads, a multiple of G; K and V are the features of a key and of a value.
Every value head has a state S [K, V], which a token decays, corrects towards its value at its key, and reads:

    S <- e^g S,    d = beta (v - S^T k),    S <- S + k d^T,    o = S^T q

S is kept as of the beginning of a block of 16 positions, with the keys, the corrections d and the sums G_j = g_0 + … +
g_j of the positions in the block, of which d and o of a later one are sums:

    d_j = beta_j (v_j - e^{G_j} S^T k_j - sum_{i<j} e^{G_j - G_i} (k_i k_j) d_i)
    o_j = e^{G_j} S^T q_j + sum_{i<=j} e^{G_j - G_i} (k_i q_j) d_i

So a token reads S once and writes little, positions can be taken back, and a prompt is a few matrix products a block.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native import Library
from onward.native.structs import GatedDeltaArguments
from onward.ops.operator import DTYPES, Operator, autocast_dtype, shapes
from onward.ops.recurrent_state import (
    STATE_BLOCK,
    TRAIN_WITHOUT_STATE,
    arguments,
    check_rows,
    check_state,
    places,
    state_at_end,
    sums_of_decays,
    through_blocks,
)

_WIDEST = 256  # K and V at most (native/src/state/gated_delta.cpp)
EPS = 1e-6


def gated_delta(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    log_rate: Tensor,
    decay_bias: Tensor,
    state: Tensor,
    held: Tensor,
    offsets: Tensor,
    rows: Tensor | None = None,
    *,
    key_heads: int,
    key_dim: int,
) -> Tensor:
    """The outputs o of the gated delta rule, computed in float32 and cast once.

    Queries and keys are divided by their Euclidean norms, queries also by sqrt(K). A row whose state is not that of
    its offset comes out as NaN.

    Args:
        qkv: float [B, T, 2 G K + H V]: the queries of all heads, then the keys, then the values.
        decay: float [B, T, H] of qkv's dtype; g = -exp(log_rate) * softplus(decay + decay_bias).
        beta: float [B, T, H] of qkv's dtype, before its sigmoid.
        log_rate, decay_bias: float32 [H].
        state: float32 [N, 2, H, `state_width(K, V)`]. Changed in place.
        held, offsets, rows: as in `onward.ops.recurrent_state`; held is changed in place.
        key_heads, key_dim: G and K.

    Returns:
        [B, T, H, V] in qkv's dtype.

    Raises:
        RequestError: shapes or dtypes that do not fit, or a gradient is wanted, which the op does not have; eagerly
            on the CPU also rows that share a slot.
    """
    if autocast_dtype(qkv) is not None:
        decay, beta = decay.to(qkv.dtype), beta.to(qkv.dtype)
    heads = log_rate.numel()
    values = qkv.shape[-1] - 2 * key_heads * key_dim
    fits = qkv.dim() == 3 and decay.shape == beta.shape == (*qkv.shape[:2], heads) and qkv.shape[1] >= 1
    fits = fits and log_rate.shape == decay_bias.shape == (heads,) and min(key_heads, key_dim, heads, values) >= 1
    if not fits or heads % key_heads or values % heads:
        raise RequestError(
            "gated_delta wants qkv [B, T, 2 G K + H V], decay and beta [B, T, H], log_rate and decay_bias [H], H a "
            f"multiple of G; got G {key_heads}, K {key_dim}, "
            f"{shapes(qkv=qkv, decay=decay, beta=beta, log_rate=log_rate, decay_bias=decay_bias)}"
        )
    floats = {"log_rate": log_rate, "decay_bias": decay_bias, "state": state}
    if qkv.dtype not in DTYPES or any(x.dtype != qkv.dtype for x in (decay, beta)) or any(
        x.dtype != torch.float32 for x in floats.values()
    ):  # fmt: skip
        raise RequestError(
            "gated_delta wants decay and beta of the float dtype of qkv, and float32 for log_rate, decay_bias and "
            f"state; got {shapes(qkv=qkv, decay=decay, beta=beta, **floats)}"
        )
    if max(key_dim, values // heads) > _WIDEST:
        raise RequestError(f"gated_delta takes keys and values of at most {_WIDEST} features")
    width = (heads, state_width(key_dim, values // heads))
    check_state("gated_delta", state, width, held, offsets, rows, qkv.shape[0])
    return _gated_delta(qkv, decay, beta, log_rate, decay_bias, state, held, offsets, rows, key_heads, key_dim)


def state_width(key_dim: int, value_dim: int) -> int:
    """How many numbers lie at a place for a head: S, and of 16 positions the key, the correction and the decay."""
    return key_dim * value_dim + STATE_BLOCK * (key_dim + value_dim + 1)


class _Block(NamedTuple):
    """A state at the beginning of a block, and what its positions add: S [B, H, K, V], keys [B, H, 16, K], corrections
    [B, H, 16, V], decays G [B, H, 16]."""

    state: Tensor
    keys: Tensor
    corrections: Tensor
    decays: Tensor

    @staticmethod
    def of(page: Tensor, key_dim: int, value_dim: int) -> "_Block":
        sizes = [key_dim * value_dim, STATE_BLOCK * key_dim, STATE_BLOCK * value_dim, STATE_BLOCK]
        state, keys, corrections, decays = torch.split(page, sizes, -1)
        heads = page.shape[:-1]
        return _Block(
            state.view(*heads, key_dim, value_dim), keys.view(*heads, STATE_BLOCK, key_dim),
            corrections.view(*heads, STATE_BLOCK, value_dim), decays,
        )  # fmt: skip

    def page(self) -> Tensor:
        return torch.cat([self.state.flatten(-2), self.keys.flatten(-2), self.corrections.flatten(-2), self.decays], -1)

    def end(self) -> Tensor:
        return state_at_end(self.state, self.keys, self.corrections, self.decays)

    def with_state(self, state: Tensor) -> "_Block":
        return self._replace(state=state)


def _definition(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    log_rate: Tensor,
    decay_bias: Tensor,
    state: Tensor,
    held: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    key_heads: int,
    key_dim: int,
) -> Tensor:
    queries, heads = qkv.shape[1], log_rate.numel()
    value_dim = (qkv.shape[-1] - 2 * key_heads * key_dim) // heads
    at = places(held, offsets, rows, queries)
    block = _Block.of(at.read(state), key_dim, value_dim)
    step = -log_rate.exp() * F.softplus(decay.to(torch.float32) + decay_bias)
    by_head = (x.mT.unsqueeze(-1) for x in (step, beta.to(torch.float32).sigmoid()))
    tokens = *_heads(qkv, heads, key_heads, key_dim), *by_head
    return through_blocks(block, state, held, at, offsets, tokens, _through_block).to(qkv.dtype)


def _heads(qkv: Tensor, heads: int, key_heads: int, key_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [B, H, T, K], normalised, and values [B, H, T, V], in float32."""
    widths = [key_heads * key_dim, key_heads * key_dim, qkv.shape[-1] - 2 * key_heads * key_dim]
    q, k, v = torch.split(qkv.to(torch.float32), widths, -1)
    q, k, v = (
        x.reshape(*x.shape[:2], count, -1).transpose(1, 2) for x, count in ((q, key_heads), (k, key_heads), (v, heads))
    )
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q, k))
    q, k = (x.repeat_interleave(heads // key_heads, 1) for x in (q * key_dim**-0.5, k))
    return q, k, v


def _through_block(
    block: _Block, new: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Tensor, beta: Tensor
) -> tuple[_Block, Tensor]:
    """A block with its `new` positions, bool [B, 16], and the outputs [B, H, 16, V]."""
    new = new[:, None, :, None]
    keys = torch.where(new, k, block.keys)
    decays, fading = sums_of_decays(new, step, block.decays)
    of_keys = torch.where(new, beta * (fading * (keys @ keys.mT)).tril(-1), 0)
    known = torch.where(new, beta * (v - decays.exp() * (keys @ block.state)), block.corrections)
    one = torch.eye(STATE_BLOCK, device=q.device)
    corrections = torch.linalg.solve_triangular(one + of_keys, known, upper=False, unitriangular=True)
    out = decays.exp() * (q @ block.state) + (fading * (q @ keys.mT)) @ corrections
    return _Block(block.state, keys, corrections, decays.squeeze(-1)), out


def _native(
    library: Library,
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    log_rate: Tensor,
    decay_bias: Tensor,
    state: Tensor,
    held: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    key_heads: int,
    key_dim: int,
) -> Tensor:
    check_rows(offsets, rows, state.shape[0])
    qkv, decay, beta = (x if x.stride(2) == 1 else x.contiguous() for x in (qkv, decay, beta))
    log_rate, decay_bias = log_rate.contiguous(), decay_bias.contiguous()
    out = _fake(qkv, decay, beta, log_rate, decay_bias, state, held, offsets, rows, key_heads, key_dim)
    call = GatedDeltaArguments(
        batch=qkv.shape[0], queries=qkv.shape[1], key_heads=key_heads, value_heads=out.shape[2], key_dim=key_dim,
        value_dim=out.shape[3], qkv=qkv.data_ptr(), qkv_strides=qkv.stride()[:2], decay=decay.data_ptr(),
        decay_strides=decay.stride()[:2], beta=beta.data_ptr(), beta_strides=beta.stride()[:2],
        log_rate=log_rate.data_ptr(), decay_bias=decay_bias.data_ptr(), out=out.data_ptr(), dtype=DTYPES[qkv.dtype],
        eps=EPS, **arguments(state, held, offsets, rows, Tensor.data_ptr),
    )  # fmt: skip
    library.check(library.onward_gated_delta(ctypes.byref(call)), "onward_gated_delta")
    return out


def _fake(qkv: Tensor, decay: Tensor, beta: Tensor, log_rate: Tensor, *rest: object) -> Tensor:
    heads, (key_heads, key_dim) = log_rate.shape[0], rest[-2:]
    assert isinstance(key_heads, int)
    assert isinstance(key_dim, int)
    return qkv.new_empty(*qkv.shape[:2], heads, (qkv.shape[2] - 2 * key_heads * key_dim) // heads)


_gated_delta = Operator(
    "gated_delta(Tensor qkv, Tensor decay, Tensor beta, Tensor log_rate, Tensor decay_bias, Tensor(a!) state, "
    "Tensor(b!) held, Tensor offsets, Tensor? rows, int key_heads, int key_dim) -> Tensor",
    _definition,
    _native,
    _fake,
    instead=TRAIN_WITHOUT_STATE,
)
