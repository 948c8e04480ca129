"""A short causal convolution of each channel, which mixers of recurrent layers begin with (Poli et al.,
arXiv 2302.10866; Gu & Dao, arXiv 2312.00752)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native.interface import Code, Int, Pointer, Structure, kernel, strided
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand
from onward.ops.operator import Operator, autocast_dtype, like_first, shapes
from onward.ops.recurrent_state import (
    STATE_BLOCK,
    TRAIN_WITHOUT_STATE,
    StateArguments,
    check_rows,
    check_state,
    places,
    state_fields,
)


def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    block_numbers: Tensor,
    offsets: Tensor,
    rows: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """out[b, t, c] = sum over i of weight[i, c] * x[b, t - K + 1 + i, c] in float32, cast back once.

    The inputs before a row's tokens come from its state, which afterwards includes the new ones; before position 0
    they are zeros. A row whose stored state is not at its offset returns NaN.

    Args:
        x: float [B, T, C].
        weight: float [K, C], of x's dtype; the last is that of the token itself.
        state: [N, 2, K - 1 + 16, C] of x's dtype: the inputs from K - 1 before each place's block on. Changed in place.
        block_numbers, offsets, rows: as in `onward.ops.recurrent_state`; block_numbers is changed in place.
        bias: float [C], of x's dtype.
        silu: whether silu is applied to the sum.

    Returns:
        [B, T, C] in x's dtype.

    Raises:
        RequestError: shapes or dtypes don't match, or autograd follows an argument: the op has no gradient. Eagerly on
            the CPU also rows that share a slot.
    """
    if x.dtype != weight.dtype and autocast_dtype(x) is not None:
        x = x.to(weight.dtype)
    fits = x.dim() == 3 and weight.dim() == 2 and weight.shape[1] == x.shape[2] and weight.shape[0] >= 1
    fits = fits and (bias is None or bias.shape == x.shape[2:]) and x.shape[1] >= 1
    same = all(t is None or t.dtype == x.dtype for t in (weight, state, bias))
    if not fits or x.dtype not in DTYPES or not same:
        raise RequestError(
            "short_conv expects float x [B, T, C], and a weight [K, C], bias [C] and state of its dtype; got "
            f"{shapes(x=x, weight=weight, bias=bias, state=state)}"
        )
    width = (weight.shape[0] - 1 + STATE_BLOCK, x.shape[2])
    check_state("short_conv", state, width, block_numbers, offsets, rows, x.shape[0])
    return _short_conv(x, weight, bias, state, block_numbers, offsets, rows, bool(silu))


def _definition(*arguments: Any) -> Tensor:
    x, weight, bias, state, block_numbers, offsets, rows, silu = arguments
    _, queries, channels = x.shape
    before = weight.shape[0] - 1  # the inputs that a sum needs before its own
    at = places(block_numbers, offsets, rows, queries)
    past_at = (
        offsets.long().unsqueeze(1) + torch.arange(before, device=x.device) - (at.before - 1)[:, None] * STATE_BLOCK
    )
    past = at.read(state).gather(1, past_at.unsqueeze(2).expand(-1, -1, channels))
    inputs = torch.cat([past, x], 1)  # from position offset - before on
    out = torch.zeros(1, device=x.device) if bias is None else bias.to(torch.float32)
    for i, weights in enumerate(weight.to(torch.float32)):
        out = out + weights * inputs[:, i : i + queries].to(torch.float32)

    def stored(place: Tensor, block: Tensor) -> Tensor:
        """The inputs as they are stored at a place, for positions from `before` before its block on."""
        index = torch.arange(before + STATE_BLOCK, device=x.device) + ((block - 1) * STATE_BLOCK - offsets)[:, None]
        within = ((index >= 0) & (index < before + queries)).unsqueeze(2)
        new = inputs.gather(1, index.clamp(0, before + queries - 1).unsqueeze(2).expand(-1, -1, channels))
        return torch.where(within, new, state[at.slots, place])

    at_source = stored(at.source, torch.where(at.begins, at.last, at.before))
    at_to = torch.where((at.to == at.source)[:, None, None], at_source, stored(at.to, at.last))
    at.write(state, block_numbers, at_source, at_to)
    return (F.silu(out) if silu else out).to(x.dtype)


class ShortConvArguments(Structure):
    """OnwardShortConv of native/src/state/short_conv.cpp, which documents the fields."""

    _fields_ = (
        *((name, Int) for name in ("batch", "queries", "channels", "taps")),
        *strided("x"),
        *((name, Pointer) for name in ("weight", "bias", "out")),
        *((name, Code) for name in ("dtype", "silu")),
        *StateArguments._fields_,
    )


@kernel
def onward_short_conv(arguments: ShortConvArguments) -> Code: ...


def _call(k: KernelCalls, out: Operand, *arguments: Any) -> None:
    x, weight, bias, *state, silu = arguments
    x = k.contiguous_rows(x)
    batch, queries, channels = x.shape
    call = k.struct(
        ShortConvArguments, batch=batch, queries=queries, channels=channels, taps=weight.shape[0], x=k.address(x),
        x_strides=x.stride()[:2], weight=k.optional(weight), bias=k.optional(bias),
        out=k.address(out), dtype=k.code(x), silu=silu, **state_fields(k, *state),
    )  # fmt: skip
    k.call(onward_short_conv, k.array([call]))


_short_conv = Operator(
    "short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor(b!) block_numbers, Tensor offsets, "
    "Tensor? rows, bool silu) -> Tensor",
    _definition, _call, like_first, check=lambda *arguments: check_rows(*arguments[3:7]),
    instead=TRAIN_WITHOUT_STATE,
)  # fmt: skip
