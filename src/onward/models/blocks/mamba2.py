"""Mamba2 (arXiv 2405.21060), which caches a recurrent state of fixed size instead of keys and values.

Shapes: B rows, T new tokens, D hidden_size, H heads of P features, G groups of heads, N state features.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.cache import StateShape
from onward.models.architecture import WeightScope
from onward.models.blocks.layer import LayerCache
from onward.models.blocks.norm import RMSNorm, multiplied, read_norm
from onward.models.blocks.positions import Positions
from onward.models.linear import Linear, ShortConv
from onward.ops.ssd import ssd_state_width


class Mamba2Params(NamedTuple):
    """The weights of one layer. in_proj: to z, x, b, c and dt. conv: of x, b and c. log_rate, step_bias, skip: float32
    [H]."""

    in_proj: Linear
    conv: ShortConv
    log_rate: Tensor
    step_bias: Tensor
    skip: Tensor
    norm: Tensor | None
    out_proj: Linear


@dataclass(frozen=True)
class Mamba2:
    """x, b and c go through a short convolution and the recurrence of `ops.ssd`; the output is gated by silu(z).

    norm: of all heads, or by group. norm_first: whether it precedes the gate. limits: the minimum and maximum of dt.
    in_multiplier: of the input. multipliers: of z, x, b, c and dt.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel_size: int
    norm: RMSNorm | None
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    norm_first: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))
    in_multiplier: float = 1.0
    multipliers: tuple[float, ...] = (1.0,) * 5

    @property
    def widths(self) -> tuple[int, int, int, int, int]:
        """The number of features of z, x, b, c and dt."""
        inner, keys = self.num_heads * self.head_dim, self.groups * self.state_dim
        return inner, inner, keys, keys, self.num_heads

    rope: ClassVar[None] = None
    kv_source_layer: ClassVar[None] = None
    window: ClassVar[None] = None

    @property
    def cached(self) -> StateShape:
        width = ssd_state_width(self.num_heads // self.groups, self.state_dim, self.head_dim)
        return StateShape(sum(self.widths[1:4]), self.kernel_size, self.groups, width)

    def read(self, scope: WeightScope) -> Mamba2Params:
        heads, inner = self.num_heads, self.widths[0]
        return Mamba2Params(
            in_proj=scope.linear("in_proj", sum(self.widths), self.hidden_size, self.in_bias),
            conv=scope.short_conv("conv1d", sum(self.widths[1:4]), self.kernel_size, self.conv_bias),
            log_rate=scope.take_float32("A_log", heads),
            step_bias=scope.take_float32("dt_bias", heads),
            skip=scope.take_float32("D", heads),
            norm=read_norm(self.norm, scope.under("norm")),
            out_proj=scope.linear("out_proj", self.hidden_size, inner, self.out_bias),
        )

    def __call__(
        self, params: Mamba2Params, x_BTD: Tensor, positions: Positions, cache: LayerCache, index: int
    ) -> Tensor:
        z, mixed, step = self._projected(params, x_BTD)
        state = cache.state(index)
        rows = state.block_numbers, positions.offsets, state.rows
        mixed = ops.short_conv(mixed, params.conv.by_tap, state.inputs, *rows, bias=params.conv.bias)
        out_BTHP = ops.ssd(
            mixed, step, params.log_rate, params.step_bias, params.skip, state.state, *rows,
            groups=self.groups, state_dim=self.state_dim, limits=self.limits,
        )  # fmt: skip
        return params.out_proj(self._gated(params, z, out_BTHP.flatten(2)))

    def _projected(self, params: Mamba2Params, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z, then x, b and c together, and dt before its softplus."""
        projected = params.in_proj(multiplied(x, self.in_multiplier))
        if any(factor != 1.0 for factor in self.multipliers):
            parts = torch.split(projected, list(self.widths), -1)
            projected = torch.cat([part * m for part, m in zip(parts, self.multipliers, strict=True)], -1)
        z, mixed, step = torch.split(projected, [self.widths[0], sum(self.widths[1:4]), self.widths[4]], -1)
        return z, mixed, step

    def _gated(self, params: Mamba2Params, z: Tensor, out: Tensor) -> Tensor:
        if self.norm is None or params.norm is None:
            return ops.swiglu(z, out)
        if self.norm_first:
            return ops.swiglu(z, self.norm(params.norm, out))
        return self.norm(params.norm, ops.swiglu(z, out))
