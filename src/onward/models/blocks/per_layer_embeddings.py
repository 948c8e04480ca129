"""Per-layer embeddings (Gemma 3n and 4): each layer adds its own embedding of the tokens to the residual stream.

Shapes: B rows, T new tokens, D hidden_size, L layers, P width of a layer's embedding.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from onward import ops
from onward.models.architecture import WeightScope
from onward.models.blocks.feed_forward import Activation, gated_product
from onward.models.blocks.norm import RMSNorm, rounded
from onward.models.linear import Embedding, Linear


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
