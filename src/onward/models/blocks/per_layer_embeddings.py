"""Per-layer embeddings (Gemma 3n and 4): each layer adds what a table of its own has of a token to the stream.

Shapes: B rows, T new tokens, D hidden_size, L layers, P width of what a layer is given.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from onward import ops
from onward.models.architecture import WeightScope
from onward.models.blocks.feed_forward import Activation
from onward.models.blocks.norm import RMSNorm, rounded
from onward.models.linear import Embedding, Linear


class PerLayerEmbeddingsParams(NamedTuple):
    """The tables of all layers side by side, and what makes as much of the embedded tokens."""

    embed_tokens: Embedding
    projection: Linear
    norm: Tensor


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """What each layer is given of a token: (table[id] * P ** 0.5 + norm(projection(x) * D ** -0.5)) * 2 ** -0.5.

    norm: of P features. The factor of the table is rounded to its dtype.
    """

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
        """int [B, T] ids and float [B, T, D], the embedded tokens -> [B, T, L, P]."""
        shape = *tokens.shape, self.num_layers, self.width
        given = params.embed_tokens(tokens) * rounded(self.width**0.5, x_BTD.dtype)
        projected = (params.projection(x_BTD) * self.hidden_size**-0.5).view(shape)
        return (self.norm(params.norm, projected) + given.view(shape)) * 2**-0.5


class PerLayerInputParams(NamedTuple):
    """The weights with which a layer takes what it is given."""

    gate: Linear
    projection: Linear
    norm: Tensor


@dataclass(frozen=True)
class PerLayerInput:
    """x + norm(projection(activation(gate(x)) * given)), at the end of a layer."""

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

    def __call__(self, params: PerLayerInputParams, x_BTD: Tensor, given_BTP: Tensor) -> Tensor:
        gated = self._gated(params.gate(x_BTD), given_BTP)
        return ops.add(x_BTD, self.norm(params.norm, params.projection(gated)))

    def _gated(self, gate: Tensor, given: Tensor) -> Tensor:
        if self.activation == "silu":
            return ops.swiglu(gate, given)
        return ops.geglu(gate, given, approximate=self.activation == "gelu_tanh")
