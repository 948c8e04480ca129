"""Low-rank updates of a product, chosen per row: LoRA (Hu et al., arXiv 2106.09685), with the scales of DoRA
(Liu et al., arXiv 2402.09353).

Shapes: B rows, K inputs, N outputs, S adapters in slots, R the highest rank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.native.interface import Code, Int, Pointer, Structure, kernel
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand
from onward.ops.operator import Operator, shapes


def lora(
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    ranks: Tensor,
    *,
    factors: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """`y * scale[s] + shift[s] + (x @ a[s, :r].T * factors[s, :r]) @ b[s, :r]`, with s the row's slot and r = ranks[s];
    y where r is 0.

    The product with `a` stays in float32; the result is rounded once. Rows of a slot of rank 0 are y's own bits.

    Args:
        x: float [B, …, K].
        y: float [B, …, N], of x's dtype: the product of x with the weight, and its bias.
        a: float [S, R, K], b: float [S, R, N], of x's dtype; slots may be strided. Nothing past a slot's rank is used.
        slots: int32 [B], in 0 … S - 1.
        ranks: int32 [S], in 0 … R.
        factors: float32 [S, R] if a and b are int8: the scale of each row of a times that of b's.
        scale, shift: float32 [S, N], or both None. A shift of -0.0 changes no bit.

    Returns:
        [B, …, N] in x's dtype.

    Raises:
        RequestError: shapes or dtypes that don't match; on the CPU a slot or a rank out of range.
    """
    outputs = y.shape[-1]
    fits = x.dim() >= 2 and x.shape[:-1] == y.shape[:-1] and slots.shape == x.shape[:1] and ranks.shape == a.shape[:1]
    fits = fits and a.dim() == b.dim() == 3 and a.shape == (*b.shape[:2], x.shape[-1]) and b.shape[2] == outputs
    fits = fits and a.shape[1] > 0 and (factors is None or factors.shape == a.shape[:2])
    fits = fits and (scale is None) == (shift is None)
    fits = fits and all(t is None or t.shape == (a.shape[0], outputs) for t in (scale, shift))
    stored = x.dtype if factors is None else torch.int8
    dtypes_fit = y.dtype == x.dtype and a.dtype == b.dtype == stored and slots.dtype == ranks.dtype == torch.int32
    if not fits or not dtypes_fit or x.dtype not in DTYPES:
        operands = {"x": x, "y": y, "a": a, "b": b, "slots": slots, "ranks": ranks}
        raise RequestError(
            "lora expects float x [B, …, K], y [B, …, N], a [S, R, K], b [S, R, N] of one dtype (a and b int8 with "
            "factors [S, R]) and int32 slots [B] and ranks [S]; got "
            f"{shapes(**operands, factors=factors, scale=scale, shift=shift)}"
        )
    return _lora(x, y, a, b, slots, ranks, factors, scale, shift)


def _definition(*arguments: Any) -> Tensor:
    x, y, a, b, slots, ranks, factors, scale, shift = arguments
    at = slots.long()
    used = torch.arange(a.shape[1], dtype=torch.int32, device=a.device) < ranks[at].unsqueeze(1)  # [B, R]
    rows_x = x.reshape(len(x), -1, x.shape[-1]).float()  # [B, T, K]
    base = y.reshape(len(y), -1, y.shape[-1]).float()  # [B, T, N]
    row_a, row_b = (torch.where(used.unsqueeze(2), t[at].float(), 0.0) for t in (a, b))
    inner = rows_x @ row_a.transpose(1, 2)
    update = (inner if factors is None else inner * factors[at].unsqueeze(1)) @ row_b
    scaled = base if scale is None else base * scale[at].unsqueeze(1) + shift[at].unsqueeze(1)
    total = torch.where((ranks[at] == 0).view(-1, 1, 1), base, scaled + update)
    return total.to(x.dtype).view(y.shape)


class LoraArguments(Structure):
    """OnwardLora of native/src/linear/lora.cpp: the low-rank update of one matrix."""

    _fields_ = (
        *((name, Int) for name in ("outputs", "rank", "y_stride", "a_stride", "b_stride", "out_stride")),
        *((name, Pointer) for name in ("y", "a", "b", "factors", "scale", "shift", "ranks", "out")),
    )


# slots: int32
@kernel
def onward_lora(
    parts: LoraArguments, count: Int, rows: Int, tokens: Int, inputs: Int, num_slots: Int, dtype: Code, x: Pointer,
    x_stride: Int, slots: Pointer,
) -> Code: ...  # fmt: skip


class LoraPart(NamedTuple):
    """The update of one product; the arguments of `lora` apart from x and slots, and the result."""

    out: Operand
    y: Operand
    a: Operand
    b: Operand
    ranks: Operand
    factors: Operand | None
    scale: Operand | None
    shift: Operand | None


def call_lora(k: KernelCalls, x: Operand, slots: Operand, parts: Sequence[LoraPart]) -> None:
    """One call for the updates of several products of one x, by stacks of one size and dtype."""
    x, rows, inputs, stride = k.rows(x)
    structs = [_struct(k, part) for part in parts]
    k.call(
        onward_lora, k.array(structs), len(structs), rows, max(rows // max(slots.shape[0], 1), 1), inputs,
        parts[0].a.shape[0], k.code(x), k.address(x), stride, k.address(k.contiguous(slots)),
    )  # fmt: skip


def _struct(k: KernelCalls, part: LoraPart) -> Any:
    y, _, outputs, y_stride = k.rows(part.y)
    # Each slot [R, K] of a stack [S, R, K] has to be contiguous.
    a, b = (t if t.stride()[1:] == (t.shape[2], 1) else k.contiguous(t) for t in (part.a, part.b))
    return k.struct(
        LoraArguments, outputs=outputs, rank=a.shape[1], y_stride=y_stride, a_stride=a.stride()[0],
        b_stride=b.stride()[0], out_stride=outputs, y=k.address(y), a=k.address(a), b=k.address(b),
        ranks=k.address(k.contiguous(part.ranks)), out=k.address(part.out),
        factors=k.optional(part.factors), scale=k.optional(part.scale),
        shift=k.optional(part.shift),
    )  # fmt: skip


def _call(
    k: KernelCalls, out: Operand, x: Operand, y: Operand, a: Operand, b: Operand, slots: Operand, *rest: Any
) -> None:
    call_lora(k, x, slots, [LoraPart(out, y, a, b, *rest)])


_lora: Operator[Tensor] = Operator(
    "lora(Tensor x, Tensor y, Tensor a, Tensor b, Tensor slots, Tensor ranks, Tensor? factors, Tensor? scale, "
    "Tensor? shift) -> Tensor",
    _definition, _call, lambda x, y, *_: y.new_empty(y.shape),
)  # fmt: skip
