"""The parts of a hosted module: the running forward pass, to which the module itself passes nothing, and linear layers
with packed, quantized or stock weights.

Each `nn.Linear` is replaced by a module that has a mark of `onward.models.linear` and calls `onward.ops`, so packing
and quantization find its matrix, and its products are exact like those of other models.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onward.cache import LayerShape
from onward.errors import RequestError
from onward.models.blocks.layer import LayerCache
from onward.models.contract import take_positions
from onward.models.linear import Embedding, Linear, float_weight

NAME = "onward"  # of Onward's attention, masks and experts in transformers' registries


def library(module: str = "") -> Any:
    """Import transformers, or a module of it.

    Raises:
        RequestError: it is not installed, or too old.
    """
    try:
        return importlib.import_module(f"transformers.{module}" if module else "transformers")
    except ImportError as error:
        raise RequestError(
            f"via='transformers' needs transformers 5 or newer ({error}): pip install 'onward[transformers]'"
        ) from error


class UnsupportedModuleError(RequestError):
    """A transformers module whose attention cannot run over Onward's KV cache; the message says why."""


@dataclass(eq=False)
class CacheSurvey:
    """The observations of a first forward pass.

    cached: the cache shape by layer index. windows_of: the windows of each layer's keys. windows: by the number of the
    attention call. masks: placeholders (kept alive) and their windows, by id.
    """

    cached: dict[int, LayerShape] = field(default_factory=dict)
    windows_of: dict[int, set[int | None]] = field(default_factory=dict)
    windows: list[int | None] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, int | None]] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)


@dataclass(eq=False)
class Step:
    """One forward pass.

    offsets: int32 [B]. cache: None during a survey. places: the cache index of each layer. windows: by the number of
    the attention call. logits_at: int64 [R, N], the positions whose logits the head computes. states: the layer, keys
    and values of each cache update, by the keys' id.
    """

    offsets: Tensor
    cache: LayerCache | None
    places: dict[int, int]
    windows: list[int | None]
    logits_at: Tensor | None = None
    survey: CacheSurvey | None = None
    calls: int = 0
    states: dict[int, tuple[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    _written: set[int] = field(default_factory=set)

    @property
    def unread(self) -> bool:
        """Whether attention was not called with all cached keys and values, or none were cached."""
        return not self.states or len(self._written) < len(self.states)

    def layer_of(self, keys: Tensor, values: Tensor) -> tuple[int, bool]:
        """The index of the layer with these keys and values, and whether they are new to the cache."""
        layer, states = self.states.get(id(keys), (-1, None))
        if states is None or states[1] is not values:
            raise UnsupportedModuleError("a layer changes keys or values between its cache and its attention")
        new = layer not in self._written
        self._written.add(layer)
        return layer, new


_current: ContextVar[Step | None] = ContextVar("onward_hosted_step", default=None)


def current_step() -> Step:
    """The forward pass of this thread. Raises `UnsupportedModuleError` if the module runs its own attention."""
    step = _current.get()
    if step is None:
        raise UnsupportedModuleError("a module that Onward runs was called from outside of Onward")
    return step


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Make a step the current one within the block."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


class TransformersLinear(nn.Module):
    """x @ weight.T + bias. part: the weights of the current forward pass."""

    def __init__(self, part: Linear, in_features: int, out_features: int) -> None:
        super().__init__()
        self.part = part
        self.in_features, self.out_features = in_features, out_features

    @property
    def weight(self) -> Tensor:
        """The stock weight [N, K], for modules that read it directly."""
        return float_weight(self.part.weight)

    @property
    def bias(self) -> Tensor | None:
        return self.part.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class TransformersHead(TransformersLinear):
    """The head, which computes only the selected logits."""

    def forward(self, x: Tensor) -> Tensor:
        step = _current.get()
        return self.part(x if step is None or step.logits_at is None else take_positions(x, step.logits_at))


class TransformersEmbedding(nn.Module):
    """An embedding that shares the weight of a tied head."""

    def __init__(self, part: Embedding, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.part = part
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @property
    def weight(self) -> Tensor:
        return float_weight(self.part.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.part(ids)


Hosted = TransformersLinear | TransformersEmbedding


def replace_linears(module: Any) -> dict[str, Hosted]:
    """Replace a module's linear layers, and the embedding of a tied head; the new parts by name."""
    head = module.get_output_embeddings()
    table = module.get_input_embeddings()
    conv1d = library("pytorch_utils").Conv1D
    replaced: dict[int, Hosted] = {}
    tied: dict[int, Tensor] = {}  # one tensor for both, so that it is packed once
    if type(table) is nn.Embedding and head is not None and getattr(head, "weight", None) is table.weight:
        tied[id(table.weight)] = table.weight.detach()
        replaced[id(table)] = TransformersEmbedding(Embedding(tied[id(table.weight)]), *table.weight.shape)
    for part in list(module.modules()):
        if type(part) is nn.Linear:
            weight = tied.get(id(part.weight), part.weight.detach())
            bias = None if part.bias is None else part.bias.detach()
            kind = TransformersHead if part is head else TransformersLinear
            replaced[id(part)] = kind(Linear(weight, bias), part.in_features, part.out_features)
        elif type(part) is conv1d:  # GPT-2 stores [K, N]
            linear = Linear(part.weight.detach().T, part.bias.detach())
            replaced[id(part)] = TransformersLinear(linear, *part.weight.shape)
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if id(child) in replaced:
                setattr(part, name, replaced[id(child)])
    return {name: part for name, part in module.named_modules() if isinstance(part, Hosted)}


# Tokens whose expert matrices are gathered at once.
_MAX_TOKENS = 16


def run_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum the chosen experts of each token, in the order of the choice.

    Args:
        hidden_states: [N, D]. top_k_index: int [N, K]. top_k_weights: [N, K].
    """
    chunks = zip(*(torch.split(each, _MAX_TOKENS) for each in (hidden_states, top_k_index, top_k_weights)), strict=True)
    outputs = [_run_few(self, *chunk) for chunk in chunks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _run_few(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    total = None
    for choice in range(index.shape[1]):
        expert = index[:, choice]
        if self.has_gate:
            up = self._apply_gate(_product(self, "gate_up_proj", expert, x))
        else:
            up = self.act_fn(_product(self, "up_proj", expert, x))
        out = _product(self, "down_proj", expert, up)
        if self.has_post_expert_norm:
            out = self.post_expert_norm(out)
        weighted = (out * weights[:, choice].unsqueeze(-1)).to(x.dtype)
        total = weighted if total is None else total + weighted
    assert total is not None, "a token has one expert or more"
    return total


def _product(self: Any, name: str, expert: Tensor, x: Tensor) -> Tensor:
    """x [N, K] times the matrix of each token's expert -> [N, M]."""
    weights = getattr(self, name)[expert]
    out: Tensor = x.unsqueeze(1) @ (weights if self.is_transposed else weights.transpose(1, 2))
    out = out.squeeze(1)
    if self.has_bias:
        out = out + getattr(self, f"{name}_bias")[expert]
    return out
