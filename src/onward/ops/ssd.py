"""The recurrence of Mamba2, "state space duality" (Dao & Gu, arXiv 2405.21060).

Shapes: B rows, T tokens, H heads of P features, G groups of heads, N features of a key of the state. Every head
has a state S [N, P], which a token decays, adds to and reads; b and c [N] are those of the head's group:

    dt = softplus(step + step_bias) within limits,    g = -exp(log_rate) dt
    S <- e^g S + b (dt x)^T,    y = S^T c + D x

S is kept as of the beginning of a block of 16 positions, with b, dt x and the sums G_j = g_0 + … + g_j of the positions
in the block, of which the y of a later one is a sum:

    y_j = e^{G_j} S^T c_j + sum_{i<=j} e^{G_j - G_i} (b_i c_j) dt_i x_i + D x_j

So a token reads S once and writes little, positions can be taken back, and a prompt is a few matrix products a block.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native import Library
from onward.native.structs import SsdArguments
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

WIDEST = 256  # N and P at most (native/src/state/blocks.h)


def ssd(
    mixed: Tensor,
    step: Tensor,
    log_rate: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    state: Tensor,
    held: Tensor,
    offsets: Tensor,
    rows: Tensor | None = None,
    *,
    groups: int,
    state_dim: int,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """The outputs y of Mamba2's recurrence, computed in float32 and cast once.

    A row whose state is not that of its offset comes out as NaN.

    Args:
        mixed: float [B, T, H P + 2 G N]: x of all heads, then b of all groups, then c.
        step: float [B, T, H] of mixed's dtype.
        log_rate, step_bias, skip: float32 [H]; skip is D.
        state: float32 [N slots, 2, G, `ssd_state_width(H / G, N, P)`]. Changed in place.
        held, offsets, rows: as in `onward.ops.recurrent_state`; held is changed in place.
        groups, state_dim: G and N.
        limits: the least and the greatest dt.

    Returns:
        [B, T, H, P] in mixed's dtype.

    Raises:
        RequestError: shapes or dtypes that do not fit, or a gradient is wanted, which the op does not have; eagerly
            on the CPU also rows that share a slot.
    """
    if autocast_dtype(mixed) is not None:
        step = step.to(mixed.dtype)
    heads = log_rate.numel()
    features = mixed.shape[-1] - 2 * groups * state_dim
    fits = mixed.dim() == 3 and step.shape == (*mixed.shape[:2], heads) and mixed.shape[1] >= 1
    fits = fits and all(x.shape == (heads,) for x in (log_rate, step_bias, skip))
    if not fits or min(groups, state_dim, heads, features) < 1 or heads % groups or features % heads:
        raise RequestError(
            "ssd wants mixed [B, T, H P + 2 G N], step [B, T, H], and log_rate, step_bias and skip [H], H a multiple "
            f"of G; got G {groups}, N {state_dim}, "
            f"{shapes(mixed=mixed, step=step, log_rate=log_rate, step_bias=step_bias, skip=skip)}"
        )
    floats = {"log_rate": log_rate, "step_bias": step_bias, "skip": skip, "state": state}
    if mixed.dtype not in DTYPES or step.dtype != mixed.dtype or any(
        x.dtype != torch.float32 for x in floats.values()
    ):  # fmt: skip
        raise RequestError(
            "ssd wants step of the float dtype of mixed, and float32 for log_rate, step_bias, skip and state; got "
            f"{shapes(mixed=mixed, step=step, **floats)}"
        )
    if max(state_dim, features // heads) > WIDEST:
        raise RequestError(f"ssd takes states of at most {WIDEST} by {WIDEST} numbers a head")
    width = (groups, ssd_state_width(heads // groups, state_dim, features // heads))
    check_state("ssd", state, width, held, offsets, rows, mixed.shape[0])
    least, most = map(float, limits)
    return _ssd(mixed, step, log_rate, step_bias, skip, state, held, offsets, rows, groups, state_dim, least, most)


def ssd_state_width(heads: int, state_dim: int, head_dim: int) -> int:
    """How many numbers lie at a place for a group of `heads`: of 16 positions b, and for each head S, and of 16
    positions dt x and the decay."""
    return STATE_BLOCK * state_dim + heads * (state_dim * head_dim + STATE_BLOCK * (head_dim + 1))


class _Block(NamedTuple):
    """A state at the beginning of a block, and what its positions add: S [B, H, N, P], keys b [B, H, 16, N], added dt x
    [B, H, 16, P], decays G [B, H, 16]. groups: of the heads, which share keys."""

    state: Tensor
    keys: Tensor
    added: Tensor
    decays: Tensor
    groups: int

    @staticmethod
    def of(page: Tensor, heads: int, state_dim: int, head_dim: int) -> "_Block":
        """page: [B, G, width]"""
        batch, groups, width = page.shape
        keys, rest = torch.split(page, [STATE_BLOCK * state_dim, width - STATE_BLOCK * state_dim], -1)
        keys = keys.view(batch, groups, STATE_BLOCK, state_dim).repeat_interleave(heads // groups, 1)
        sizes = [state_dim * head_dim, STATE_BLOCK * head_dim, STATE_BLOCK]
        state, added, decays = torch.split(rest.reshape(batch, heads, -1), sizes, -1)
        return _Block(
            state.view(batch, heads, state_dim, head_dim), keys, added.view(batch, heads, STATE_BLOCK, head_dim),
            decays, groups,
        )  # fmt: skip

    def page(self) -> Tensor:
        batch, heads = self.decays.shape[:2]
        keys = self.keys[:, :: heads // self.groups].flatten(-2)
        of_heads = torch.cat([self.state.flatten(-2), self.added.flatten(-2), self.decays], -1)
        return torch.cat([keys, of_heads.view(batch, self.groups, -1)], -1)

    def end(self) -> Tensor:
        return state_at_end(self.state, self.keys, self.added, self.decays)

    def with_state(self, state: Tensor) -> "_Block":
        return self._replace(state=state)


def _definition(
    mixed: Tensor,
    step: Tensor,
    log_rate: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    state: Tensor,
    held: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    groups: int,
    state_dim: int,
    least: float,
    most: float,
) -> Tensor:
    heads, of_groups = log_rate.numel(), groups * state_dim
    x, keys, queries = torch.split(mixed.to(torch.float32), [mixed.shape[-1] - 2 * of_groups, of_groups, of_groups], -1)
    x = x.view(*x.shape[:2], heads, -1).transpose(1, 2)
    keys, queries = (
        part.view(*part.shape[:2], groups, -1).transpose(1, 2).repeat_interleave(heads // groups, 1)
        for part in (keys, queries)
    )
    dt = F.softplus(step.to(torch.float32) + step_bias).clamp(least, most).mT.unsqueeze(-1)  # [B, H, T, 1]
    at = places(held, offsets, rows, mixed.shape[1])
    block = _Block.of(at.read(state), heads, state_dim, x.shape[-1])
    tokens = queries, keys, dt * x, -log_rate.exp()[:, None, None] * dt
    read = through_blocks(block, state, held, at, offsets, tokens, _through_block)
    return (read + skip.unsqueeze(-1) * x.transpose(1, 2)).to(mixed.dtype)


def _through_block(
    block: _Block, new: Tensor, queries: Tensor, keys: Tensor, added: Tensor, step: Tensor
) -> tuple[_Block, Tensor]:
    """A block with its `new` positions, bool [B, 16], and what the positions read, [B, H, 16, P]."""
    new = new[:, None, :, None]
    keys, added = torch.where(new, keys, block.keys), torch.where(new, added, block.added)
    decays, fading = sums_of_decays(new, step, block.decays)
    out = decays.exp() * (queries @ block.state) + (fading * (queries @ keys.mT)) @ added
    return _Block(block.state, keys, added, decays.squeeze(-1), block.groups), out


def _native(
    library: Library,
    mixed: Tensor,
    step: Tensor,
    log_rate: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    state: Tensor,
    held: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    groups: int,
    state_dim: int,
    least: float,
    most: float,
) -> Tensor:
    check_rows(offsets, rows, state.shape[0])
    mixed, step = (x if x.stride(2) == 1 else x.contiguous() for x in (mixed, step))
    log_rate, step_bias, skip = (x.contiguous() for x in (log_rate, step_bias, skip))
    out = _fake(mixed, step, log_rate, step_bias, skip, state, held, offsets, rows, groups, state_dim)
    call = SsdArguments(
        batch=mixed.shape[0], queries=mixed.shape[1], groups=groups, heads=out.shape[2], state_dim=state_dim,
        head_dim=out.shape[3], mixed=mixed.data_ptr(), mixed_strides=mixed.stride()[:2], step=step.data_ptr(),
        step_strides=step.stride()[:2], log_rate=log_rate.data_ptr(), step_bias=step_bias.data_ptr(),
        skip=skip.data_ptr(), out=out.data_ptr(), dtype=DTYPES[mixed.dtype], least=least, most=most,
        **arguments(state, held, offsets, rows, Tensor.data_ptr),
    )  # fmt: skip
    library.check(library.onward_ssd(ctypes.byref(call)), "onward_ssd")
    return out


def _fake(mixed: Tensor, step: Tensor, log_rate: Tensor, *rest: object) -> Tensor:
    groups, state_dim = rest[6:8]
    assert isinstance(groups, int)
    assert isinstance(state_dim, int)
    heads = log_rate.shape[0]
    return mixed.new_empty(*mixed.shape[:2], heads, (mixed.shape[2] - 2 * groups * state_dim) // heads)


_ssd = Operator(
    "ssd(Tensor mixed, Tensor step, Tensor log_rate, Tensor step_bias, Tensor skip, Tensor(a!) state, "
    "Tensor(b!) held, Tensor offsets, Tensor? rows, int groups, int state_dim, float least, float most) -> Tensor",
    _definition,
    _native,
    _fake,
    instead=TRAIN_WITHOUT_STATE,
)
