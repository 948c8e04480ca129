"""Logprobs of whole texts with a gradient: the numbers that sampling and scoring report, bit for bit."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from onward.cache import WholeTexts
from onward.errors import RequestError
from onward.models import Model, architecture_of
from onward.models.adapters.forward import AdaptedLinear
from onward.models.blocks import Decoder
from onward.models.linear import float_weight
from onward.ops.operator import autocast_dtype_on
from onward.ops.packed import NativeWeight, packed_view
from onward.sampling import logprobs

# The logits in memory at a time, which are a few times as many numbers.
_MAX_LOGITS = 2**24


# (params, number of rows) -> params
Adapted = Callable[[Any, int], Any]


class ScoredText(NamedTuple):
    """ids: at least one. first: the index of the first id that gets a logprob, at least 1."""

    ids: list[int]
    first: int


def logprobs_of(model: Model, texts: Sequence[ScoredText], adapted: Adapted | None = None) -> list[Tensor]:
    """The logprob of each id of each text from its `first` on, given the ids before it: float32 [len(ids) - first].

    All texts run in one forward, without padding. Autograd follows the parameters of a trained model.

    adapted: adds an adapter to the params.
    """
    architecture = architecture_of(model)
    if not isinstance(architecture, Decoder):
        raise RequestError(
            "lm.logprobs needs a model of a built-in family: this one has a forward of its own (docs/exact-training.md)"
        )
    if autocast_dtype_on(model.device.type) is not None:
        raise RequestError(
            "lm.logprobs does not run under autocast, which would change the bits of its forward: leave the autocast "
            "context, and load the model in the dtype for its computation"
        )
    if any(not keys.is_floating_point() for keys in model.new_cache(1, 1).keys):
        raise RequestError(
            "lm.logprobs attends to keys and values in floats, and this model's cache rounds them: load it without "
            "cache_format="
        )
    params = model.params if model.trainable is None else model.trainable.in_graph()
    lengths = [len(text.ids) - 1 for text in texts if len(text.ids) > 1]
    counts = [len(text.ids) - text.first for text in texts]
    if not sum(counts):
        return [torch.zeros(count) for count in counts]
    tokens = [token for text in texts for token in text.ids[:-1]]
    positions = [position for length in lengths for position in range(length)]
    if adapted is not None:
        params = adapted(params, len(tokens))
    scored = [position >= text.first - 1 for text in texts for position in range(len(text.ids) - 1)]
    hidden = architecture.head_input(
        torch.tensor(tokens, dtype=torch.int32, device=model.device).unsqueeze(1),
        torch.tensor(positions, dtype=torch.int32, device=model.device),
        WholeTexts(lengths),
        params,
    ).squeeze(1)
    if not all(scored):
        hidden = hidden[torch.tensor(scored, device=model.device)]
    targets = torch.tensor([token for text in texts for token in text.ids[text.first :]], device=model.device)
    if isinstance(params.lm_head, AdaptedLinear):  # of an adapter that is not trained
        return list(torch.split(_chosen(architecture, params, hidden, targets), counts))
    head = params.lm_head.weight
    data = head if isinstance(head, Tensor) else head.data
    chosen: Tensor = _HeadLogprobs.apply(architecture, params, hidden, data, targets)  # type: ignore[no-untyped-call]
    return list(torch.split(chosen, counts))


class _HeadLogprobs(torch.autograd.Function):
    """The logprobs of targets [N] under the head's logits of hidden [N, D]; never all logits at once. data: the tensor
    of the head's weight, which may need a gradient."""

    @staticmethod
    def forward(ctx: Any, architecture: Decoder, params: Any, hidden: Tensor, data: Tensor, targets: Tensor) -> Tensor:
        ctx.architecture, ctx.params = architecture, params
        size = _rows(architecture)
        # Logits that fit at once are kept for the backward pass.
        products = params.lm_head(hidden) if len(hidden) <= size else None
        ctx.save_for_backward(hidden, data, targets, products)
        if products is not None:
            return logprobs(architecture.scaled(products), targets).chosen
        return _chosen(architecture, params, hidden, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        architecture, params = ctx.architecture, ctx.params
        hidden, _, targets, kept = ctx.saved_tensors  # the weight is among them to be checked for changes since
        size = _rows(architecture)
        needs_hidden, needs_data = ctx.needs_input_grad[2:4]
        weight = float_weight(params.lm_head.weight).detach()
        to_hidden, to_weight = [], torch.zeros_like(weight) if needs_data else None
        for x, ids, share in zip(*(torch.split(each, size) for each in (hidden, targets, grad)), strict=True):
            products = (params.lm_head(x) if kept is None else kept).detach().requires_grad_()
            with torch.enable_grad():
                logits = architecture.scaled(products).to(torch.float32)
            to_logits = logits.detach().softmax(-1).mul_(-share.unsqueeze(1))
            to_logits.scatter_add_(1, ids.unsqueeze(1), share.unsqueeze(1))
            (to_products,) = torch.autograd.grad(logits, products, to_logits)
            if needs_hidden:
                to_hidden.append(to_products @ weight)
            if to_weight is not None:
                to_weight.addmm_(to_products.T, x)
        to_data = to_weight
        if to_weight is not None and isinstance(params.lm_head.weight, NativeWeight):
            to_data = packed_view(to_weight)
        return None, None, torch.cat(to_hidden) if needs_hidden else None, to_data, None


@torch.no_grad()
def _chosen(architecture: Decoder, params: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    size = _rows(architecture)
    rows = zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
    return torch.cat([logprobs(architecture.logits(params, x), ids).chosen for x, ids in rows])


def _rows(architecture: Decoder) -> int:
    return max(1, _MAX_LOGITS // architecture.vocab_size)
