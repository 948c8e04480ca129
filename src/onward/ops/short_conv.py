"""A short causal convolution of each channel, which mixers of recurrent layers begin with (Poli et al.,
arXiv 2302.10866; Gu & Dao, arXiv 2312.00752)."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native import Library
from onward.native.structs import ShortConvArguments
from onward.ops.operator import DTYPES, Operator, autocast_dtype, like_first, shapes
from onward.ops.recurrent_state import STATE_BLOCK, TRAIN_WITHOUT_STATE, arguments, check_rows, check_state, places


def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    held: Tensor,
    offsets: Tensor,
    rows: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """out[b, t, c] = sum over i of weight[i, c] * x[b, t - K + 1 + i, c] in float32, cast back once.

    What lies before a row's tokens comes from its state, which afterwards holds them too; before position 0 lie zeros.
    A row whose state is not that of its offset comes out as NaN.

    Args:
        x: float [B, T, C].
        weight: float [K, C], of x's dtype; the last is that of the token itself.
        state: [N, 2, K - 1 + 16, C] of x's dtype: the inputs from K - 1 before each place's block on. Changed in place.
        held, offsets, rows: as in `onward.ops.recurrent_state`; held is changed in place.
        bias: float [C], of x's dtype.
        silu: whether silu is applied to the sum.

    Returns:
        [B, T, C] in x's dtype.

    Raises:
        RequestError: shapes or dtypes that do not fit, or a gradient is wanted, which the op does not have; eagerly
            on the CPU also rows that share a slot.
    """
    if x.dtype != weight.dtype and autocast_dtype(x) is not None:
        x = x.to(weight.dtype)
    operands = (x, weight, state) if bias is None else (x, weight, state, bias)
    fits = x.dim() == 3 and weight.dim() == 2 and weight.shape[1] == x.shape[2] and weight.shape[0] >= 1
    fits = fits and (bias is None or bias.shape == x.shape[2:]) and x.shape[1] >= 1
    if not fits or x.dtype not in DTYPES or any(t.dtype != x.dtype for t in operands):
        raise RequestError(
            "short_conv wants float x [B, T, C], and a weight [K, C], bias [C] and state of its dtype; got "
            f"{shapes(x=x, weight=weight, bias=bias, state=state)}"
        )
    width = (weight.shape[0] - 1 + STATE_BLOCK, x.shape[2])
    check_state("short_conv", state, width, held, offsets, rows, x.shape[0])
    return _short_conv(x, weight, bias, state, held, offsets, rows, bool(silu))


def _definition(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    held: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    silu: bool,
) -> Tensor:
    _, queries, channels = x.shape
    before = weight.shape[0] - 1  # how many inputs a sum wants before its own
    at = places(held, offsets, rows, queries)
    past_at = (
        offsets.long().unsqueeze(1) + torch.arange(before, device=x.device) - (at.before - 1)[:, None] * STATE_BLOCK
    )
    past = at.read(state).gather(1, past_at.unsqueeze(2).expand(-1, -1, channels))
    inputs = torch.cat([past, x], 1)  # from position offset - before on
    out = torch.zeros(1, device=x.device) if bias is None else bias.to(torch.float32)
    for i, of_input in enumerate(weight.to(torch.float32)):
        out = out + of_input * inputs[:, i : i + queries].to(torch.float32)

    def stored(place: Tensor, block: Tensor) -> Tensor:
        """The inputs as they lie at a place, for positions from `before` before its block on."""
        index = torch.arange(before + STATE_BLOCK, device=x.device) + ((block - 1) * STATE_BLOCK - offsets)[:, None]
        within = ((index >= 0) & (index < before + queries)).unsqueeze(2)
        taken = inputs.gather(1, index.clamp(0, before + queries - 1).unsqueeze(2).expand(-1, -1, channels))
        return torch.where(within, taken, state[at.slots, place])

    at_source = stored(at.source, torch.where(at.begins, at.last, at.before))
    at.write(
        state, held, at_source, torch.where((at.to == at.source)[:, None, None], at_source, stored(at.to, at.last))
    )
    return (F.silu(out) if silu else out).to(x.dtype)


def _native(
    library: Library,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    held: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    silu: bool,
) -> Tensor:
    check_rows(offsets, rows, state.shape[0])
    x = x if x.stride(2) == 1 else x.contiguous()
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    call = ShortConvArguments(
        batch=x.shape[0], queries=x.shape[1], channels=x.shape[2], taps=weight.shape[0], x=x.data_ptr(),
        x_strides=x.stride()[:2], weight=weight.data_ptr(), bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(), dtype=DTYPES[x.dtype], silu=silu,
        **arguments(state, held, offsets, rows, Tensor.data_ptr),
    )  # fmt: skip
    library.check(library.onward_short_conv(ctypes.byref(call)), "onward_short_conv")
    return out


_short_conv = Operator(
    "short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor(b!) held, Tensor offsets, "
    "Tensor? rows, bool silu) -> Tensor",
    _definition,
    _native,
    like_first,
    instead=TRAIN_WITHOUT_STATE,
)
