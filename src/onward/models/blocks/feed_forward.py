"""Feed-forward blocks: gated (arXiv 2002.05202) and relu2 (arXiv 2109.08668)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.models.architecture import WeightScope
from onward.models.blocks.norm import multiplied
from onward.models.linear import Linear

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
