"""The recurrence of Mamba2, "state space duality" (Dao & Gu, arXiv 2405.21060).

Shapes: B rows, T tokens, H heads of P features, G groups of heads, N features of a key of the state. Every head has a
state S [N, P], which a token decays, adds to and reads; b and c [N] are those of the head's group:

    dt = softplus(dt + step_bias) within limits,    g = -exp(A_log) dt
    S <- e^g S + b (dt x)^T,    y = S^T c + D x

A cache stores S at the beginning of a block of 16 positions, with b, dt x and the sums G_j = g_0 + … + g_j of the
positions in the block, from which later outputs follow:

    y_j = e^{G_j} S^T c_j + sum_{i<=j} e^{G_j - G_i} (b_i c_j) dt_i x_i + D x_j

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

WIDEST = 256  # of N and of P (native/src/state/blocks.h)


def ssd(
    mixed: Tensor,
    dt: Tensor,
    A_log: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    state: Tensor,
    block_numbers: Tensor,
    offsets: Tensor,
    rows: Tensor | None = None,
    *,
    groups: int,
    state_dim: int,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """The outputs y of Mamba2's recurrence, computed in float32 and cast once.

    A row whose stored state is not at its offset returns NaN.

    Args:
        mixed: float [B, T, H P + 2 G N]: x of all heads, then b of all groups, then c.
        dt: float [B, T, H] of mixed's dtype, before bias and softplus.
        A_log, step_bias, skip: float32 [H]; skip is D.
        state: float32 [N slots, 2, G, `ssd_state_width(H / G, N, P)`]. Changed in place.
        block_numbers, offsets, rows: as in `onward.ops.recurrent_state`; block_numbers is changed in place.
        groups, state_dim: G and N.
        limits: the minimum and maximum of dt.

    Returns:
        [B, T, H, P] in mixed's dtype.

    Raises:
        RequestError: shapes or dtypes don't match, or autograd follows an argument: the op has no gradient. Eagerly on
            the CPU also rows that share a slot.
    """
    if autocast_dtype(mixed) is not None:
        dt = dt.to(mixed.dtype)
    heads = A_log.numel()
    features = mixed.shape[-1] - 2 * groups * state_dim
    fits = mixed.dim() == 3 and dt.shape == (*mixed.shape[:2], heads) and mixed.shape[1] >= 1
    fits = fits and all(x.shape == (heads,) for x in (A_log, step_bias, skip))
    floats = {"A_log": A_log, "step_bias": step_bias, "skip": skip}
    if not fits or min(groups, state_dim, heads, features) < 1 or heads % groups or features % heads:
        raise RequestError(
            "ssd expects mixed [B, T, H P + 2 G N], dt [B, T, H], and A_log, step_bias and skip [H], H a multiple "
            f"of G; got G {groups}, N {state_dim}, {shapes(mixed=mixed, dt=dt, **floats)}"
        )
    floats["state"] = state
    if mixed.dtype not in DTYPES or dt.dtype != mixed.dtype or {x.dtype for x in floats.values()} != {torch.float32}:
        raise RequestError(
            "ssd expects dt of the float dtype of mixed, and float32 for A_log, step_bias, skip and state; got "
            f"{shapes(mixed=mixed, dt=dt, **floats)}"
        )
    if max(state_dim, features // heads) > WIDEST:
        raise RequestError(f"ssd supports states of at most {WIDEST} x {WIDEST} per head")
    width = (groups, ssd_state_width(heads // groups, state_dim, features // heads))
    check_state("ssd", state, width, block_numbers, offsets, rows, mixed.shape[0])
    least, most = map(float, limits)
    return _ssd(
        mixed, dt, A_log, step_bias, skip, state, block_numbers, offsets, rows, groups, state_dim, least, most
    )  # fmt: skip


def ssd_state_width(heads: int, state_dim: int, head_dim: int) -> int:
    """How many numbers a group of `heads` stores: b of 16 positions, and per head S, and dt x and the decay of 16
    positions."""
    return STATE_BLOCK * state_dim + heads * (state_dim * head_dim + STATE_BLOCK * (head_dim + 1))


def _unpack(page: Tensor, heads: int, state_dim: int, head_dim: int) -> StateBlock:
    """The block stored in page [B, G, width], its keys repeated for the heads of their group."""
    batch, groups, width = page.shape
    keys, rest = torch.split(page, [STATE_BLOCK * state_dim, width - STATE_BLOCK * state_dim], -1)
    keys = keys.view(batch, groups, STATE_BLOCK, state_dim).repeat_interleave(heads // groups, 1)
    sizes = [state_dim * head_dim, STATE_BLOCK * head_dim, STATE_BLOCK]
    state, dt_x, decays = torch.split(rest.reshape(batch, heads, -1), sizes, -1)
    state, dt_x = state.view(batch, heads, state_dim, head_dim), dt_x.view(batch, heads, STATE_BLOCK, head_dim)
    return StateBlock(state, keys, dt_x, decays)


def _pack(block: StateBlock, groups: int) -> Tensor:
    batch, heads = block.decays.shape[:2]
    keys = block.keys[:, :: heads // groups].flatten(-2)
    by_head = torch.cat([block.state.flatten(-2), block.updates.flatten(-2), block.decays], -1)
    return torch.cat([keys, by_head.view(batch, groups, -1)], -1)


def _definition(*arguments: Any) -> Tensor:
    mixed, dt, A_log, step_bias, skip, state, block_numbers, offsets, rows, groups, state_dim, least, most = arguments
    heads, width = A_log.numel(), groups * state_dim
    x, keys, queries = torch.split(mixed.to(torch.float32), [mixed.shape[-1] - 2 * width, width, width], -1)
    x = x.view(*x.shape[:2], heads, -1).transpose(1, 2)
    keys, queries = (
        part.view(*part.shape[:2], groups, -1).transpose(1, 2).repeat_interleave(heads // groups, 1)
        for part in (keys, queries)
    )
    dt = F.softplus(dt.to(torch.float32) + step_bias).clamp(least, most).mT.unsqueeze(-1)  # [B, H, T, 1]
    at = places(block_numbers, offsets, rows, mixed.shape[1])
    block = _unpack(at.read(state), heads, state_dim, x.shape[-1])
    tokens = queries, keys, dt * x, -A_log.exp()[:, None, None] * dt
    out = through_blocks(block, state, block_numbers, at, offsets, tokens, _advance, lambda b: _pack(b, groups))
    y: Tensor = out + skip.unsqueeze(-1) * x.transpose(1, 2)
    return y.to(mixed.dtype)


def _advance(
    block: StateBlock, new: Tensor, queries: Tensor, keys: Tensor, dt_x: Tensor, log_decays: Tensor
) -> tuple[StateBlock, Tensor]:
    """A block with its `new` positions, bool [B, 16], and their outputs [B, H, 16, P]."""
    new = new[:, None, :, None]
    keys, dt_x = torch.where(new, keys, block.keys), torch.where(new, dt_x, block.updates)
    decays, remaining = sums_of_decays(new, log_decays, block.decays)
    out = decays.exp() * (queries @ block.state) + (remaining * (queries @ keys.mT)) @ dt_x
    return StateBlock(block.state, keys, dt_x, decays.squeeze(-1)), out


class SsdArguments(Structure):
    """OnwardSsd of native/src/state/ssd.cpp, which documents the fields."""

    _fields_ = (
        *((name, Int) for name in ("batch", "queries", "groups", "heads", "state_dim", "head_dim")),
        *strided("mixed", "step"),
        *((name, Pointer) for name in ("log_rate", "step_bias", "skip", "out")),
        ("dtype", Code),
        *((name, Float) for name in ("least", "most")),
        *StateArguments._fields_,
    )


@kernel
def onward_ssd(arguments: SsdArguments) -> Code: ...


def _call(k: KernelCalls, out: Operand, *arguments: Any) -> None:
    mixed, dt, A_log, step_bias, skip, *state, groups, state_dim, least, most = arguments
    mixed, dt = map(k.contiguous_rows, (mixed, dt))
    batch, queries, heads, head_dim = out.shape
    call = k.struct(
        SsdArguments, batch=batch, queries=queries, groups=groups, heads=heads, state_dim=state_dim, head_dim=head_dim,
        mixed=k.address(mixed), mixed_strides=mixed.stride()[:2], step=k.address(dt), step_strides=dt.stride()[:2],
        log_rate=k.address(k.contiguous(A_log)), step_bias=k.address(k.contiguous(step_bias)),
        skip=k.address(k.contiguous(skip)), out=k.address(out), dtype=k.code(mixed), least=least, most=most,
        **state_fields(k, *state),
    )  # fmt: skip
    k.call(onward_ssd, k.array([call]))


def _fake(mixed: Tensor, dt: Tensor, A_log: Tensor, *rest: Any) -> Tensor:
    groups, state_dim = rest[6:8]
    heads = A_log.shape[0]
    return mixed.new_empty(*mixed.shape[:2], heads, (mixed.shape[2] - 2 * groups * state_dim) // heads)


_ssd = Operator(
    "ssd(Tensor mixed, Tensor dt, Tensor A_log, Tensor step_bias, Tensor skip, Tensor(a!) state, Tensor(b!) "
    "block_numbers, Tensor offsets, Tensor? rows, int groups, int state_dim, float least, float most) -> Tensor",
    _definition, _call, _fake, check=lambda *arguments: check_rows(*arguments[5:9]),
    instead=TRAIN_WITHOUT_STATE,
)  # fmt: skip
