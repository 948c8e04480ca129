"""A gated short convolution (LFM2, arXiv 2511.23404), which caches its last inputs instead of keys and values.

Shapes: B rows, T new tokens, D hidden_size.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from onward import ops
from onward.cache import StateShape
from onward.models.architecture import WeightScope
from onward.models.blocks.layer import LayerCache
from onward.models.blocks.positions import Positions
from onward.models.linear import Linear, ShortConv


class ShortConvMixerParams(NamedTuple):
    in_proj: Linear
    conv: ShortConv
    out_proj: Linear


@dataclass(frozen=True)
class ShortConvMixer:
    """out_proj(c * conv(b * x)) with b, c and x from `in_proj`. bias: of all three."""

    hidden_size: int
    kernel_size: int
    bias: bool = False

    rope: ClassVar[None] = None
    kv_source_layer: ClassVar[None] = None
    window: ClassVar[None] = None

    @property
    def cached(self) -> StateShape:
        return StateShape(self.hidden_size, self.kernel_size, 0, 0)

    def read(self, scope: WeightScope) -> ShortConvMixerParams:
        return ShortConvMixerParams(
            in_proj=scope.linear("in_proj", 3 * self.hidden_size, self.hidden_size, self.bias),
            conv=scope.short_conv("conv", self.hidden_size, self.kernel_size, self.bias),
            out_proj=scope.linear("out_proj", self.hidden_size, self.hidden_size, self.bias),
        )

    def __call__(
        self, params: ShortConvMixerParams, x_BTD: Tensor, positions: Positions, cache: LayerCache, index: int
    ) -> Tensor:
        before, after, x = params.in_proj(x_BTD).chunk(3, -1)
        state = cache.state(index)
        mixed = ops.short_conv(
            before * x, params.conv.by_tap, state.inputs, state.block_numbers, positions.offsets, state.rows,
            bias=params.conv.bias, silu=False,
        )  # fmt: skip
        return params.out_proj(after * mixed)
