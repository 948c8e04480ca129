"""The gated delta rule (Yang et al., arXiv 2412.06464).

Shapes: B rows, T tokens, G key heads, H value heads, a multiple of G; K and V are the features of a key and of a value.
Every value head has a state S [K, V], which a token decays, corrects towards its value at its key, and reads:

    S <- e^g S,    d = beta (v - S^T k),    S <- S + k d^T,    o = S^T q

A cache stores S at the beginning of a block of 16 positions, with the keys, the corrections d and the sums G_j = g_0 +
… + g_j of the positions in the block, from which later d and o follow:

    d_j = beta_j (v_j - e^{G_j} S^T k_j - sum_{i<j} e^{G_j - G_i} (k_i k_j) d_i)
    o_j = e^{G_j} S^T q_j + sum_{i<=j} e^{G_j - G_i} (k_i q_j) d_i

So a token reads S once and writes little, positions can be rolled back, and a prompt is a few matrix products a block.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native.interface import Code, Float, Int, Pointer, Structure, kernel, strided
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand
from onward.ops.operator import Operator, autocast_dtype, shapes
from onward.ops.recurrent_state import (
    STATE_BLOCK,
    TRAIN_WITHOUT_STATE,
    StateArguments,
    StateBlock,
    check_rows,
    check_state,
    places,
    state_fields,
    sums_of_decays,
    through_blocks,
)

_MAX_DIM = 256  # of K and of V (native/src/state/gated_delta.cpp)
EPS = 1e-6


def gated_delta(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    A_log: Tensor,
    decay_bias: Tensor,
    state: Tensor,
    block_numbers: Tensor,
    offsets: Tensor,
    rows: Tensor | None = None,
    *,
    key_heads: int,
    key_dim: int,
) -> Tensor:
    """The outputs o of the gated delta rule, computed in float32 and cast once.

    Queries and keys are divided by their Euclidean norms, queries also by sqrt(K). A row whose stored state is not at
    its offset returns NaN.

    Args:
        qkv: float [B, T, 2 G K + H V]: the queries of all heads, then the keys, then the values.
        decay: float [B, T, H] of qkv's dtype; g = -exp(A_log) * softplus(decay + decay_bias).
        beta: float [B, T, H] of qkv's dtype, before its sigmoid.
        A_log, decay_bias: float32 [H].
        state: float32 [N, 2, H, `state_width(K, V)`]. Changed in place.
        block_numbers, offsets, rows: as in `onward.ops.recurrent_state`; block_numbers is changed in place.
        key_heads, key_dim: G and K.

    Returns:
        [B, T, H, V] in qkv's dtype.

    Raises:
        RequestError: shapes or dtypes don't match, or autograd follows an argument: the op has no gradient. Eagerly on
            the CPU also rows that share a slot.
    """
    if autocast_dtype(qkv) is not None:
        decay, beta = decay.to(qkv.dtype), beta.to(qkv.dtype)
    heads = A_log.numel()
    values = qkv.shape[-1] - 2 * key_heads * key_dim
    fits = qkv.dim() == 3 and decay.shape == beta.shape == (*qkv.shape[:2], heads) and qkv.shape[1] >= 1
    fits = fits and A_log.shape == decay_bias.shape == (heads,) and min(key_heads, key_dim, heads, values) >= 1
    inputs, floats = {"qkv": qkv, "decay": decay, "beta": beta}, {"A_log": A_log, "decay_bias": decay_bias}
    if not fits or heads % key_heads or values % heads:
        raise RequestError(
            "gated_delta expects qkv [B, T, 2 G K + H V], decay and beta [B, T, H], A_log and decay_bias [H], H a "
            f"multiple of G; got G {key_heads}, K {key_dim}, {shapes(**inputs, **floats)}"
        )
    floats["state"] = state
    dtypes = {x.dtype for x in inputs.values()}, {x.dtype for x in floats.values()}
    if qkv.dtype not in DTYPES or dtypes != ({qkv.dtype}, {torch.float32}):
        raise RequestError(
            "gated_delta expects decay and beta of the float dtype of qkv, and float32 for A_log, decay_bias and "
            f"state; got {shapes(**inputs, **floats)}"
        )
    if max(key_dim, values // heads) > _MAX_DIM:
        raise RequestError(f"gated_delta supports keys and values with at most {_MAX_DIM} features")
    width = (heads, state_width(key_dim, values // heads))
    check_state("gated_delta", state, width, block_numbers, offsets, rows, qkv.shape[0])
    return _gated_delta(qkv, decay, beta, A_log, decay_bias, state, block_numbers, offsets, rows, key_heads, key_dim)


def state_width(key_dim: int, value_dim: int) -> int:
    """How many numbers a head stores: S, and the key, correction and decay of 16 positions."""
    return key_dim * value_dim + STATE_BLOCK * (key_dim + value_dim + 1)


def _unpack(page: Tensor, key_dim: int, value_dim: int) -> StateBlock:
    sizes = [key_dim * value_dim, STATE_BLOCK * key_dim, STATE_BLOCK * value_dim, STATE_BLOCK]
    state, keys, corrections, decays = torch.split(page, sizes, -1)
    state, keys, corrections = (
        part.view(*page.shape[:-1], -1, width)
        for part, width in ((state, value_dim), (keys, key_dim), (corrections, value_dim))
    )
    return StateBlock(state, keys, corrections, decays)


def _pack(block: StateBlock) -> Tensor:
    return torch.cat([*(part.flatten(-2) for part in block[:3]), block.decays], -1)


def _definition(*arguments: Any) -> Tensor:
    qkv, decay, beta, A_log, decay_bias, state, block_numbers, offsets, rows, key_heads, key_dim = arguments
    queries, heads = qkv.shape[1], A_log.numel()
    value_dim = (qkv.shape[-1] - 2 * key_heads * key_dim) // heads
    at = places(block_numbers, offsets, rows, queries)
    block = _unpack(at.read(state), key_dim, value_dim)
    log_decays = -A_log.exp() * F.softplus(decay.to(torch.float32) + decay_bias)
    by_head = (x.mT.unsqueeze(-1) for x in (log_decays, beta.to(torch.float32).sigmoid()))
    tokens = *_heads(qkv, heads, key_heads, key_dim), *by_head
    return through_blocks(block, state, block_numbers, at, offsets, tokens, _advance, _pack).to(qkv.dtype)


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


def _advance(
    block: StateBlock, new: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decays: Tensor, beta: Tensor
) -> tuple[StateBlock, Tensor]:
    """A block with its `new` positions, bool [B, 16], and their outputs [B, H, 16, V]."""
    new = new[:, None, :, None]
    keys = torch.where(new, k, block.keys)
    decays, remaining = sums_of_decays(new, log_decays, block.decays)
    products = torch.where(new, beta * (remaining * (keys @ keys.mT)).tril(-1), 0)
    known = torch.where(new, beta * (v - decays.exp() * (keys @ block.state)), block.updates)
    one = torch.eye(STATE_BLOCK, device=q.device)
    corrections = torch.linalg.solve_triangular(one + products, known, upper=False, unitriangular=True)
    out = decays.exp() * (q @ block.state) + (remaining * (q @ keys.mT)) @ corrections
    return StateBlock(block.state, keys, corrections, decays.squeeze(-1)), out


class GatedDeltaArguments(Structure):
    """OnwardGatedDelta of native/src/state/gated_delta.cpp, which documents the fields."""

    _fields_ = (
        *((name, Int) for name in ("batch", "queries", "key_heads", "value_heads", "key_dim", "value_dim")),
        *strided("qkv", "decay", "beta"),
        *((name, Pointer) for name in ("log_rate", "decay_bias", "out")),
        ("dtype", Code),
        ("eps", Float),
        *StateArguments._fields_,
    )


@kernel
def onward_gated_delta(arguments: GatedDeltaArguments) -> Code: ...


def _call(k: KernelCalls, out: Operand, *arguments: Any) -> None:
    qkv, decay, beta, A_log, decay_bias, *state, key_heads, key_dim = arguments
    qkv, decay, beta = map(k.contiguous_rows, (qkv, decay, beta))
    batch, queries, value_heads, value_dim = out.shape
    call = k.struct(
        GatedDeltaArguments, batch=batch, queries=queries, key_heads=key_heads, value_heads=value_heads,
        key_dim=key_dim, value_dim=value_dim, qkv=k.address(qkv), qkv_strides=qkv.stride()[:2], decay=k.address(decay),
        decay_strides=decay.stride()[:2], beta=k.address(beta), beta_strides=beta.stride()[:2],
        log_rate=k.address(k.contiguous(A_log)), decay_bias=k.address(k.contiguous(decay_bias)), out=k.address(out),
        dtype=k.code(qkv), eps=EPS, **state_fields(k, *state),
    )  # fmt: skip
    k.call(onward_gated_delta, k.array([call]))


def _fake(qkv: Tensor, decay: Tensor, beta: Tensor, A_log: Tensor, *rest: Any) -> Tensor:
    heads, (key_heads, key_dim) = A_log.shape[0], rest[-2:]
    return qkv.new_empty(*qkv.shape[:2], heads, (qkv.shape[2] - 2 * key_heads * key_dim) // heads)


_gated_delta = Operator(
    "gated_delta(Tensor qkv, Tensor decay, Tensor beta, Tensor A_log, Tensor decay_bias, Tensor(a!) state, "
    "Tensor(b!) block_numbers, Tensor offsets, Tensor? rows, int key_heads, int key_dim) -> Tensor",
    _definition, _call, _fake, check=lambda *arguments: check_rows(*arguments[5:9]),
    instead=TRAIN_WITHOUT_STATE,
)  # fmt: skip
