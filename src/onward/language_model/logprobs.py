"""Logprobs of whole texts with a gradient: the numbers that sampling and scoring report, bit for bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from onward.cache import WholeTexts
from onward.decoding import Sequence as TextSequence
from onward.decoding.step import output_scores
from onward.errors import RequestError
from onward.models import Model, architecture_of
from onward.models.adapters.forward import AdaptedLinear
from onward.models.blocks import Decoder
from onward.models.linear import float_weight
from onward.ops.operator import autocast_dtype_on
from onward.ops.packed import NativeWeight, packed_view
from onward.sampling import Sampler
from onward.sampling.logprobs import entropies, logprobs, support

# The logits to compute at a time, which take a few times as many numbers.
_MAX_LOGITS = 2**24
# The logits to save for the backward pass. The others are computed again, as a further product with the head.
_MAX_SAVED_LOGITS = 2**26


# (params, number of rows) -> params
Adapted = Callable[[Any, int], Any]


class ScoredText(NamedTuple):
    """ids: at least one. first: the index of the first id that gets a logprob, at least 1. drawn: a sequence with these
    ids as its output, for the logprobs of its sampling; None for the model's own."""

    ids: list[int]
    first: int
    drawn: TextSequence | None = None


class TextLogprobs(NamedTuple):
    """Logprobs of N ids of a text, and facts about the distribution at the position of each.

    chosen, entropy and top have gradients.

    chosen: of the ids, float32 [N]. entropy: in nats, float32 [N]. top_ids: the most likely ids, best first, int64
    [N, k]. top: their logprobs, float32 [N, k]. support: how many ids could be drawn, int64 [N].
    """

    chosen: Tensor
    entropy: Tensor
    top_ids: Tensor
    top: Tensor
    support: Tensor


def logprobs_of(
    model: Model, texts: Sequence[ScoredText], adapted: Adapted | None = None, top: int | None = None
) -> list[Tensor] | list[TextLogprobs]:
    """The logprob of each id of each text from its `first` on, given the ids before it: float32 [len(ids) - first].

    top: also return entropies and the logprobs of this many of the most likely ids.
    adapted: adds an adapter to the params.

    All texts run in one forward, without padding. Autograd follows the parameters of a trained model.
    """
    architecture = architecture_of(model)
    if not isinstance(architecture, Decoder):
        raise RequestError(
            "lm.logprobs needs a model of a built-in family: this one has a forward of its own (docs/exact-training.md)"
        )
    if autocast_dtype_on(model.device.type) is not None:
        raise RequestError(
            "lm.logprobs does not run under autocast, which would change the bits of its forward: leave the autocast "
            "context, and load the model in the dtype of the computation"
        )
    if any(not keys.is_floating_point() for keys in model.new_cache(1, 1).keys):
        raise RequestError(
            "lm.logprobs attends to keys and values in floats, and this model's cache rounds them: load it without "
            "cache_format="
        )
    params = model.params if model.trainable is None else model.trainable.in_graph()
    lengths = [len(text.ids) - 1 for text in texts if len(text.ids) > 1]
    counts = [len(text.ids) - text.first for text in texts]
    tokens = [token for text in texts for token in text.ids[:-1]]
    positions = [position for length in lengths for position in range(length)]
    if adapted is not None:
        params = adapted(params, len(tokens))
    scored = [position >= text.first - 1 for text in texts for position in range(len(text.ids) - 1)]
    head = _Head.of(architecture, params, texts, top, model.device)
    if not any(scored):
        nothing = torch.zeros(0, model.vocab_size, device=model.device)
        return head.split([*head.reported(nothing, head.targets)], counts)
    hidden = architecture.head_input(
        torch.tensor(tokens, dtype=torch.int32, device=model.device).unsqueeze(1),
        torch.tensor(positions, dtype=torch.int32, device=model.device),
        WholeTexts(lengths),
        params,
    ).squeeze(1)
    if not all(scored):
        hidden = hidden[torch.tensor(scored, device=model.device)]
    if isinstance(params.lm_head, AdaptedLinear):  # of an adapter that is not trained
        with torch.no_grad():
            return head.split(head(hidden)[0], counts)
    weight = params.lm_head.weight
    data = weight if isinstance(weight, Tensor) else weight.data
    max_saved = _MAX_SAVED_LOGITS if torch.is_grad_enabled() else 0
    return head.split(_HeadLogprobs.apply(head, hidden, data, max_saved), counts)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Head:
    """The head over the scored ids of texts.

    targets: the ids, int64 [N]. texts: those that get the logprobs of their sampling: the index of the first id in
    `targets`, the sequence, its sampler. top: as in `logprobs_of`.
    """

    architecture: Decoder
    params: Any
    targets: Tensor
    texts: list[tuple[int, TextSequence, Sampler]]
    top: int | None

    @classmethod
    def of(
        cls, architecture: Decoder, params: Any, texts: Sequence[ScoredText], top: int | None, device: torch.device
    ) -> "_Head":
        targets = [token for text in texts for token in text.ids[text.first :]]
        drawn, begin = [], 0
        for text in texts:
            if text.drawn is not None and text.drawn.sampling is not None:
                drawn.append((begin, text.drawn, Sampler([text.drawn.sampling], device)))
            begin += len(text.ids) - text.first
        return cls(architecture, params, torch.tensor(targets, dtype=torch.int64, device=device), drawn, top)

    @property
    def rows(self) -> int:
        """How many rows of logits to have at a time."""
        return max(1, _MAX_LOGITS // self.architecture.vocab_size)

    def scores(self, products: Tensor, first: int) -> Tensor:
        """The logits [n, V] whose softmax has the logprobs of the targets from `first` on, from the head's products."""
        logits = self.architecture.scaled(products)
        if not self.texts:
            return logits
        parts, last = [], first + len(logits)
        for begin, text, sampler in self.texts:
            low, high = max(first, begin), min(last, begin + len(text.token_ids))
            if low < high:
                ids = text.token_ids[low - begin : high - begin]
                parts.append(output_scores(text, sampler, low - begin, ids, logits[low - first : high - first]))
        return torch.cat(parts)

    def reported(self, scores: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        """The logprobs of ids [n] under their scores [n, V], or all fields of `TextLogprobs`."""
        found = logprobs(scores, ids, self.top or 0)
        if self.top is None:
            return (found.chosen,)
        return found.chosen, entropies(scores), found.top_ids, found.top, support(scores)

    def __call__(self, hidden: Tensor, max_saved: int = 0) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """`reported` for the head's input, float [N, D], and the products of its first rows, in chunks of `rows` rows.

        max_saved: how many numbers these products may have.
        """
        parts, saved = [], []
        for first in range(0, len(hidden), self.rows):
            products = self.params.lm_head(hidden[first : first + self.rows])
            parts.append(self.reported(self.scores(products, first), self.targets[first : first + self.rows]))
            max_saved -= products.numel()
            if max_saved >= 0:
                saved.append(products)
        return tuple(map(torch.cat, zip(*parts, strict=True))), saved

    def split(self, fields: Sequence[Tensor], counts: list[int]) -> list[Tensor] | list[TextLogprobs]:
        texts = zip(*(torch.split(field, counts) for field in fields), strict=True)
        return [own[0] for own in texts] if self.top is None else [TextLogprobs(*own) for own in texts]


class _HeadLogprobs(torch.autograd.Function):
    """`_Head` of hidden [N, D]; never all logits at once. data: the tensor of the head's weight, which may need a
    gradient."""

    @staticmethod
    def forward(ctx: Any, head: _Head, hidden: Tensor, data: Tensor, max_saved: int) -> tuple[Tensor, ...]:
        fields, saved = head(hidden, max_saved)
        ctx.head = head
        ctx.save_for_backward(hidden, data, fields[2] if len(fields) > 1 else None, *saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(field for field in fields if not field.is_floating_point()))
        return fields

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        head: _Head = ctx.head
        hidden, _, top_ids, *saved = ctx.saved_tensors  # the weight is among them to be checked for changes since
        needs_hidden, needs_data = ctx.needs_input_grad[1:3]
        weight = float_weight(head.params.lm_head.weight).detach()
        to_hidden, to_weight = [], torch.zeros_like(weight) if needs_data else None
        for first in range(0, len(hidden), head.rows):
            rows = slice(first, first + head.rows)
            x = hidden[rows]
            products = (saved.pop(0) if saved else head.params.lm_head(x)).detach().requires_grad_()
            with torch.enable_grad():
                scores = head.scores(products, first).to(torch.float32)
            of_chosen, of_entropy, _, of_top, _ = (
                None if grad is None else grad[rows] for grad in (*grads, *[None] * (5 - len(grads)))
            )
            chosen = [] if of_chosen is None else [(head.targets[rows].unsqueeze(1), of_chosen.unsqueeze(1))]
            likely = [] if of_top is None else [(top_ids[rows], of_top)]
            to_scores = gradient_of_scores(scores.detach(), [*chosen, *likely], of_entropy)
            (to_products,) = torch.autograd.grad(scores, products, to_scores)
            if needs_hidden:
                to_hidden.append(to_products @ weight)
            if to_weight is not None:
                to_weight.addmm_(to_products.T, x)
        to_data = to_weight
        if to_weight is not None and isinstance(head.params.lm_head.weight, NativeWeight):
            to_data = packed_view(to_weight)
        return None, torch.cat(to_hidden) if needs_hidden else None, to_data, None


def gradient_of_scores(
    scores: Tensor, shares: Sequence[tuple[Tensor, Tensor]], of_entropy: Tensor | None = None
) -> Tensor:
    """The gradient of scores [n, V] from those of logprobs and entropies under their softmax.

    shares: ids int64 [n, k], and the gradient of their logprobs [n, k]. of_entropy: [n].
    """
    # d log p_i / d z_j = [i = j] - p_j. d H / d z_j = -p_j (log p_j + H)
    gradient = scores.softmax(-1)
    if of_entropy is None:
        factor: Tensor | float = 0.0
    else:
        logs = scores.log_softmax(-1).masked_fill_(gradient == 0, 0.0)  # excluded ids add nothing
        entropy = -(gradient * logs).sum(-1, keepdim=True)
        factor = logs.add_(entropy).mul_(of_entropy.unsqueeze(1))
    total = sum((own.sum(-1, keepdim=True) for _, own in shares), torch.zeros_like(scores[:, :1]))
    gradient.mul_(-(factor + total))
    for ids, own in shares:
        gradient.scatter_add_(1, ids, own)
    return gradient
