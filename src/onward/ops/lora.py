"""Low-rank updates of a product, another for each row: LoRA (Hu et al., arXiv 2106.09685), with the scales of DoRA
(Liu et al., arXiv 2402.09353).

Shapes: B rows, K inputs, N outputs, S adapters in slots, R rank.
"""

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.native import Library
from onward.ops.operators import DTYPES, Operator, shapes


def lora(
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`y * scale[s] + (x @ a[s].T) @ b[s] + bias`, with s the row's slot; `y + bias` for rows of slot 0.

    The product with `a` stays in float32; the result is rounded once. Rows of slot 0 without a bias are y's own bits.

    Args:
        x: float [B, …, K].
        y: float [B, …, N], of x's dtype: the product of x with the weight, without a bias where `bias` is given.
        a: float [S, R, K], b: float [S, R, N], of x's dtype. What slot 0 holds is not read.
        slots: int32 [B], in 0 … S - 1.
        scale: float32 [S, N] or None.
        bias: float [N] of x's dtype, or None.

    Returns:
        [B, …, N] in x's dtype.

    Raises:
        RequestError: shapes or dtypes that do not fit; on the CPU a slot that is not there.
    """
    fits = (
        x.dim() >= 2
        and x.shape[:-1] == y.shape[:-1]
        and a.dim() == b.dim() == 3
        and a.shape == (*b.shape[:2], x.shape[-1])
        and b.shape[2] == y.shape[-1]
        and a.shape[1] > 0
        and slots.shape == x.shape[:1]
        and (scale is None or scale.shape == (a.shape[0], y.shape[-1]))
        and (bias is None or bias.shape == y.shape[-1:])
    )
    same = {t.dtype for t in (x, y, a, b, bias) if t is not None}
    if not fits or len(same) > 1 or x.dtype not in DTYPES or slots.dtype != torch.int32:
        raise RequestError(
            "lora wants float x [B, …, K], y [B, …, N], a [S, R, K], b [S, R, N] of one dtype and int32 slots [B]; got "
            f"{shapes(x=x, y=y, a=a, b=b, slots=slots, scale=scale, bias=bias)}"
        )
    return _lora(x, y, a, b, slots, scale, bias)


def _definition(
    x: Tensor, y: Tensor, a: Tensor, b: Tensor, slots: Tensor, scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    at = slots.long()
    rows_x = x.reshape(len(x), -1, x.shape[-1]).float()  # [B, T, K]
    base = y.reshape(len(y), -1, y.shape[-1]).float()  # [B, T, N]
    update = (rows_x @ a[at].float().transpose(1, 2)) @ b[at].float()
    scaled = base if scale is None else base * scale[at].unsqueeze(1)
    total = torch.where((slots == 0).view(-1, 1, 1), base, scaled + update)
    total = total if bias is None else total + bias.float()
    return total.to(x.dtype).view(y.shape)


def _native(
    library: Library,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    x, y, a, b, slots = (t.contiguous() for t in (x, y, a, b, slots))
    scale, bias = (None if t is None else t.contiguous() for t in (scale, bias))
    inputs, outputs = x.shape[-1], y.shape[-1]
    rows = y.numel() // max(outputs, 1)
    out = torch.empty_like(y)
    status = library.onward_lora(
        rows, max(rows // max(len(slots), 1), 1), inputs, outputs, a.shape[1], a.shape[0], DTYPES[x.dtype],
        x.data_ptr(), inputs, y.data_ptr(), outputs, a.data_ptr(), b.data_ptr(),
        None if scale is None else scale.data_ptr(), None if bias is None else bias.data_ptr(), slots.data_ptr(),
        out.data_ptr(), outputs,
    )  # fmt: skip
    library.check(status, "onward_lora")
    return out


_lora = Operator(
    "lora(Tensor x, Tensor y, Tensor a, Tensor b, Tensor slots, Tensor? scale, Tensor? bias) -> Tensor",
    _definition,
    _native,
    lambda x, y, *_: torch.empty_like(y, memory_format=torch.contiguous_format),
)
