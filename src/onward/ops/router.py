"""The router of a mixture of experts: which experts each token goes through, with which weights.

Shapes: E experts, C of them chosen for each token.
"""

from typing import Any

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.native.interface import Code, Float, Int, Pointer, kernel
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand
from onward.ops.operator import Operator, shapes

SCORES = ("softmax", "softmax_of_chosen", "sigmoid")
MAX_EXPERTS = 4096


def top_experts(
    logits: Tensor,
    count: int,
    *,
    score: str = "softmax",
    choice_bias: Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    group_best: int = 2,
    normalize: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The `count` experts with the highest scores for each token, best first, ties by index. All in float32.

    A NaN counts as the highest, and makes weights NaN.

    Args:
        logits: float [..., E].
        score: "softmax" of all logits (Mixtral, Qwen), "softmax_of_chosen" (gpt-oss), or "sigmoid" (DeepSeek-V3, arXiv
            2412.19437).
        choice_bias: float32 [E], added to the scores that choose, not to the weights.
        groups, kept_groups, group_best: the experts form `groups` of equal size, and only those of `kept_groups` of
            them can be chosen: those whose `group_best`, 1 or 2, best scores have the largest sum (DeepSeek-V2, arXiv
            2405.04434).
        normalize: divide the weights by their sum (plus 1e-20).
        scale: multiplies the weights.

    Returns:
        chosen int32 [..., C] and weights float32 [..., C], as `experts` takes them.

    Raises:
        RequestError: shapes, dtypes or numbers that don't match.
    """
    experts = logits.shape[-1] if logits.dim() else 0
    if logits.dtype not in DTYPES or not 1 <= experts <= MAX_EXPERTS:
        raise RequestError(f"top_experts expects float logits [..., 1 … {MAX_EXPERTS}]; got {shapes(logits=logits)}")
    if score not in SCORES:
        raise RequestError(f"top_experts: score is one of {', '.join(SCORES)}; got {score!r}")
    if choice_bias is not None and (choice_bias.shape != (experts,) or choice_bias.dtype != torch.float32):
        raise RequestError(f"top_experts expects a float32 choice_bias [{experts}]; got {shapes(bias=choice_bias)}")
    if score == "softmax_of_chosen" and (choice_bias is not None or groups != 1):
        raise RequestError("top_experts: softmax_of_chosen can't be combined with choice_bias or groups")
    if groups < 1 or experts % groups or not 1 <= kept_groups <= groups:
        raise RequestError(
            f"top_experts: {experts} experts can't form {groups} equal groups of which {kept_groups} are kept"
        )
    if group_best not in (1, 2):
        raise RequestError(
            f"top_experts: a group is kept by its one or two best experts (group_best); got {group_best}"
        )
    largest = experts // groups * kept_groups
    if not 1 <= count <= largest:
        raise RequestError(f"top_experts chooses 1 … {largest} of {experts} experts; got {count}")
    routing = count, score, groups, kept_groups, group_best
    return _top_experts(logits, choice_bias, *routing, bool(normalize), float(scale))


def _definition(*arguments: Any) -> tuple[Tensor, Tensor]:
    logits, bias, count, score, groups, kept_groups, group_best, normalize, scale = arguments
    logits = logits.to(torch.float32)
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    values = logits  # without bias and groups: they have the order of the scores, without rounding
    if bias is not None or groups > 1:
        values = scores if bias is None else scores + bias
        values = values if groups == 1 else _in_best_groups(values, groups, kept_groups, group_best)
    chosen = _best(values, count)
    return chosen.to(torch.int32), _weights(logits, scores, chosen, score, normalize, scale)


def _weights(logits: Tensor, scores: Tensor, chosen: Tensor, score: str, normalize: bool, scale: float) -> Tensor:
    """The weights of chosen experts int64 [..., C], from float32 logits and their scores."""
    weights = scores.gather(-1, chosen)
    if score == "softmax_of_chosen":
        weights = logits.gather(-1, chosen).softmax(-1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


def _best(values: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest, in order, ties by index, which torch's topk does not promise."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _in_best_groups(values: Tensor, groups: int, count: int, best: int) -> Tensor:
    """The values, -inf outside the `count` groups whose `best` largest values have the largest sum."""
    grouped = values.view(*values.shape[:-1], groups, -1)
    sums = grouped.sort(dim=-1, descending=True).values[..., :best].sum(-1)
    dropped = torch.ones_like(sums, dtype=torch.bool).scatter(-1, _best(sums, count), False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)


# bias: or None; ids: int32; weights: float32
@kernel
def onward_top_experts(
    rows: Int, experts: Int, logits: Pointer, dtype: Code, stride: Int, count: Int, score: Code, bias: Pointer,
    groups: Int, kept_groups: Int, group_best: Int, normalize: Code, scale: Float, ids: Pointer, weights: Pointer,
) -> Code: ...  # fmt: skip


def _call(k: KernelCalls, out: tuple[Operand, Operand], *arguments: Any) -> None:
    logits, bias, count, score, *options = arguments
    logits, rows, experts, stride = k.rows(logits)
    k.call(
        onward_top_experts, rows, experts, k.address(logits), k.code(logits), stride, count, SCORES.index(score),
        k.optional(bias), *options, *map(k.address, out),
    )  # fmt: skip


def _fake(logits: Tensor, bias: Tensor | None, count: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], count)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


_top_experts = Operator(
    "top_experts(Tensor logits, Tensor? bias, int count, str score, int groups, int kept_groups, int group_best, "
    "bool normalize, float scale) -> (Tensor, Tensor)",
    _definition, _call, _fake,
)  # fmt: skip
