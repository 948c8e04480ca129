"""Token masks, which exclude ids from sampling, and the argmax of each row."""

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.native.interface import Code, Int, Pointer, kernel
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand
from onward.ops.operator import Operator, shapes


def apply_token_mask(logits: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """The logits with -inf for ids that are not allowed, and all others unchanged, bit for bit.

    Args:
        logits: float [N, V].
        words: int32 [N, W]: bit i of word w allows id 32 w + i. Ids past the words are not allowed.

    Returns:
        The logits [N, V], and bool [N]: whether a row has any that is not -inf.

    Raises:
        RequestError: shapes or dtypes that don't match.
    """
    fits = logits.dim() == words.dim() == 2 and len(logits) == len(words) and logits.shape[1] >= 1
    if not fits or not logits.is_floating_point() or words.dtype != torch.int32:
        raise RequestError(
            "apply_token_mask takes float logits [N, V] and int32 words [N, W]; got "
            f"{shapes(logits=logits, words=words)}"
        )
    return _apply_token_mask(logits, words) if logits.dtype in DTYPES else _mask_definition(logits, words)


def _mask_definition(logits: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.arange(logits.shape[1], device=logits.device)
    padded = torch.nn.functional.pad(words, (0, max(0, -(-logits.shape[1] // 32) - words.shape[1])))
    allowed = (padded[:, ids // 32] >> (ids % 32).to(torch.int32)) & 1 == 1
    masked = logits.masked_fill(~allowed, float("-inf"))
    return masked, (masked != float("-inf")).any(-1)


# left: bool [rows]
@kernel
def onward_apply_token_mask(
    rows: Int, columns: Int, x: Pointer, dtype: Code, stride: Int, words: Pointer, count: Int, out: Pointer,
    left: Pointer,
) -> Code: ...  # fmt: skip


def _call_mask(k: KernelCalls, out: tuple[Operand, Operand], logits: Operand, words: Operand) -> None:
    logits, words = k.contiguous_rows(logits), k.contiguous(words)
    k.call(
        onward_apply_token_mask, *logits.shape, k.address(logits), k.code(logits), logits.stride()[0], k.address(words),
        words.shape[1], *map(k.address, out),
    )  # fmt: skip


def _fake(logits: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return out, logits.new_empty(len(logits), dtype=torch.bool)


_apply_token_mask = Operator(
    "apply_token_mask(Tensor logits, Tensor words) -> (Tensor, Tensor)", _mask_definition, _call_mask, _fake
)


def argmax(x: Tensor) -> Tensor:
    """The index of the largest value: float [..., V] -> int64 [...]. Ties go to the lowest index; NaN is largest."""
    return _argmax(x) if x.dtype in DTYPES and x.numel() else x.argmax(-1)


@kernel
def onward_argmax(rows: Int, columns: Int, x: Pointer, dtype: Code, stride: Int, out: Pointer) -> Code: ...


def _call_argmax(k: KernelCalls, out: Operand, x: Operand) -> None:
    x, rows, columns, stride = k.rows(x)
    k.call(onward_argmax, rows, columns, k.address(x), k.code(x), stride, k.address(out))


_argmax: Operator[Tensor] = Operator(
    "argmax(Tensor x) -> Tensor",
    lambda x: x.argmax(-1), _call_argmax, lambda x: x.new_empty(x.shape[:-1], dtype=torch.int64),
)  # fmt: skip
