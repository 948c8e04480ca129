"""Feed-forward blocks: gated (arXiv 2002.05202) and relu2 (arXiv 2109.08668); and per-layer embeddings (Gemma 3n and
4): each layer adds its own embedding of the tokens to the residual stream.

Shapes: B rows, T new tokens, D hidden_size, L layers, P width of a layer's embedding.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.models.architecture import WeightScope
from onward.models.blocks.norm import RMSNorm, multiplied, rounded
from onward.models.linear import Embedding, Linear

Activation = Literal["silu", "gelu", "gelu_tanh"]


def gated_product(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up."""
    if activation == "silu":
        return ops.swiglu(gate, up)
    return ops.geglu(gate, up, approximate=activation == "gelu_tanh")


class FeedForwardParams(NamedTuple):
    """The weights of one layer's feed-forward block, with gate and up in one matrix or in two."""

    gate_up_proj: Linear | None
    gate_proj: Linear | None
    up_proj: Linear | None
    down_proj: Linear


@dataclass(frozen=True)
class FeedForwardNames:
    """The names of the weights in a checkpoint. gate_up_proj: gate and up in one matrix."""

    gate_proj: str = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"
    gate_up_proj: str = "gate_up_proj"


@dataclass(frozen=True)
class FeedForward:
    """down(activation(gate(x)) * up(x)). fused: the checkpoint has `gate_up_proj`. gate_multiplier, down_multiplier:
    factors of gate(x), and of the result."""

    hidden_size: int
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    fused: bool = False
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0
    names: FeedForwardNames = FeedForwardNames()

    def read(self, scope: WeightScope) -> FeedForwardParams:
        names, hidden, inner = self.names, self.hidden_size, self.intermediate_size
        return FeedForwardParams(
            scope.linear(names.gate_up_proj, 2 * inner, hidden, self.bias) if self.fused else None,
            None if self.fused else scope.linear(names.gate_proj, inner, hidden, self.bias),
            None if self.fused else scope.linear(names.up_proj, inner, hidden, self.bias),
            scope.linear(names.down_proj, hidden, inner, self.bias),
        )

    def __call__(self, params: FeedForwardParams, x: Tensor) -> Tensor:
        if params.gate_proj and params.up_proj:
            gate, up = params.gate_proj(x), params.up_proj(x)
        else:
            assert params.gate_up_proj is not None
            gate, up = params.gate_up_proj(x).chunk(2, dim=-1)
        gated = gated_product(self.activation, multiplied(gate, self.gate_multiplier), up)
        return multiplied(params.down_proj(gated), self.down_multiplier)


class UngatedFeedForwardParams(NamedTuple):
    """The weights of one layer's block without a gate."""

    up_proj: Linear
    down_proj: Linear


@dataclass(frozen=True)
class UngatedFeedForward:
    """down(relu(up(x))^2)."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    names: FeedForwardNames = FeedForwardNames()

    def read(self, scope: WeightScope) -> UngatedFeedForwardParams:
        hidden, inner = self.hidden_size, self.intermediate_size
        return UngatedFeedForwardParams(
            scope.linear(self.names.up_proj, inner, hidden, self.bias),
            scope.linear(self.names.down_proj, hidden, inner, self.bias),
        )

    def __call__(self, params: UngatedFeedForwardParams, x: Tensor) -> Tensor:
        return params.down_proj(torch.relu(params.up_proj(x)).square())


class PerLayerEmbeddingsParams(NamedTuple):
    """The tables of all layers side by side, and the projection of the main embedding."""

    embed_tokens: Embedding
    projection: Linear
    norm: Tensor


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """The embeddings of all layers: (table[id] * P ** 0.5 + norm(projection(x) * D ** -0.5)) * 2 ** -0.5. norm: of P
    features. The factor of the table is rounded to its dtype."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    width: int
    norm: RMSNorm

    def read(self, scope: WeightScope) -> PerLayerEmbeddingsParams:
        widths = self.num_layers * self.width
        return PerLayerEmbeddingsParams(
            scope.embedding("embed_tokens_per_layer", self.vocab_size, widths),
            scope.linear("per_layer_model_projection", widths, self.hidden_size),
            self.norm.read(scope.under("per_layer_projection_norm")),
        )

    def __call__(self, params: PerLayerEmbeddingsParams, tokens: Tensor, x_BTD: Tensor) -> Tensor:
        """int [B, T] ids and their main embedding float [B, T, D] -> [B, T, L, P]."""
        shape = *tokens.shape, self.num_layers, self.width
        embedded = params.embed_tokens(tokens) * rounded(self.width**0.5, x_BTD.dtype)
        projected = (params.projection(x_BTD) * self.hidden_size**-0.5).view(shape)
        return (self.norm(params.norm, projected) + embedded.view(shape)) * 2**-0.5


class PerLayerInputParams(NamedTuple):
    """The weights of one layer's input."""

    gate: Linear
    projection: Linear
    norm: Tensor


@dataclass(frozen=True)
class PerLayerInput:
    """x + norm(projection(activation(gate(x)) * embedding)), at the end of a layer."""

    hidden_size: int
    width: int
    activation: Activation
    norm: RMSNorm

    def read(self, scope: WeightScope) -> PerLayerInputParams:
        return PerLayerInputParams(
            scope.linear("per_layer_input_gate", self.width, self.hidden_size),
            scope.linear("per_layer_projection", self.hidden_size, self.width),
            self.norm.read(scope.under("post_per_layer_input_norm")),
        )

    def __call__(self, params: PerLayerInputParams, x_BTD: Tensor, embedding_BTP: Tensor) -> Tensor:
        gated = gated_product(self.activation, params.gate(x_BTD), embedding_BTP)
        return ops.add(x_BTD, self.norm(params.norm, params.projection(gated)))
