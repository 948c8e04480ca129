"""Gated DeltaNet (arXiv 2412.06464), which caches a recurrent state of fixed size instead of keys and values.

Shapes: B rows, T new tokens, D hidden_size, G key heads of K features, H value heads of V features.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.cache import StateShape
from onward.models.architecture import WeightScope
from onward.models.blocks.layer import LayerCache
from onward.models.blocks.norm import RMSNorm
from onward.models.blocks.positions import Positions
from onward.models.linear import Linear, ShortConv
from onward.ops.gated_delta import state_width


class GatedDeltaParams(NamedTuple):
    """The weights of one layer. conv: of 2 G K + H V channels. log_rate, decay_bias: float32 [H]."""

    qkv_proj: Linear
    z_proj: Linear
    decay_proj: Linear
    beta_proj: Linear
    conv: ShortConv
    log_rate: Tensor
    decay_bias: Tensor
    norm: Tensor
    out_proj: Linear


class FusedGatedDeltaParams(NamedTuple):
    """The same with the projections in two matrices."""

    qkvz_proj: Linear
    beta_decay_proj: Linear
    conv: ShortConv
    log_rate: Tensor
    decay_bias: Tensor
    norm: Tensor
    out_proj: Linear


@dataclass(frozen=True)
class GatedDelta:
    """Queries, keys and values go through a short convolution and the gated delta rule. The output is normalised by
    head and gated by silu(z).

    norm: of a value head. fused: the checkpoint has `in_proj_qkvz` and `in_proj_ba`, grouped by key head.
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    norm: RMSNorm
    fused: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """The number of features of all queries (and of all keys), and of all values."""
        return self.key_heads * self.key_dim, self.value_heads * self.value_dim

    rope: ClassVar[None] = None
    kv_source_layer: ClassVar[None] = None
    window: ClassVar[None] = None

    @property
    def cached(self) -> StateShape:
        keys, values = self.widths
        return StateShape(
            2 * keys + values, self.kernel_size, self.value_heads, state_width(self.key_dim, self.value_dim)
        )

    def read(self, scope: WeightScope) -> GatedDeltaParams | FusedGatedDeltaParams:
        hidden, heads, (keys, values) = self.hidden_size, self.value_heads, self.widths
        if self.fused:
            qkvz_proj = scope.linear("in_proj_qkvz", 2 * keys + 2 * values, hidden)
            beta_decay_proj = scope.linear("in_proj_ba", 2 * heads, hidden)
            return FusedGatedDeltaParams(qkvz_proj, beta_decay_proj, *self._read_rest(scope))
        return GatedDeltaParams(
            scope.linear("in_proj_qkv", 2 * keys + values, hidden),
            scope.linear("in_proj_z", values, hidden),
            scope.linear("in_proj_a", heads, hidden),
            scope.linear("in_proj_b", heads, hidden),
            *self._read_rest(scope),
        )

    def _read_rest(self, scope: WeightScope) -> tuple[ShortConv, Tensor, Tensor, Tensor, Linear]:
        keys, values = self.widths
        return (
            scope.short_conv("conv1d", 2 * keys + values, self.kernel_size),
            scope.take_float32("A_log", self.value_heads),
            scope.take_float32("dt_bias", self.value_heads),
            self.norm.read(scope.under("norm")),
            scope.linear("out_proj", self.hidden_size, values),
        )

    def __call__(
        self,
        params: GatedDeltaParams | FusedGatedDeltaParams,
        x_BTD: Tensor,
        positions: Positions,
        cache: LayerCache,
        index: int,
    ) -> Tensor:
        if isinstance(params, FusedGatedDeltaParams):
            qkv, z, decay, beta = self._split(params.qkvz_proj(x_BTD), params.beta_decay_proj(x_BTD))
        else:
            qkv, z = params.qkv_proj(x_BTD), params.z_proj(x_BTD)
            decay, beta = params.decay_proj(x_BTD), params.beta_proj(x_BTD)
        state = cache.state(index)
        rows = state.held, positions.offsets, state.rows
        mixed = ops.short_conv(qkv, params.conv.by_tap, state.inputs, *rows)
        out_BTHV = ops.gated_delta(
            mixed, decay, beta, params.log_rate, params.decay_bias, state.state, *rows,
            key_heads=self.key_heads, key_dim=self.key_dim,
        )  # fmt: skip
        return params.out_proj(ops.swiglu(z, self.norm(params.norm, out_BTHV).flatten(2)))

    def _split(self, qkvz: Tensor, beta_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The parts of the fused projections, which are grouped by key head."""
        ratio = self.value_heads // self.key_heads
        widths = [self.key_dim, self.key_dim, ratio * self.value_dim, ratio * self.value_dim]
        qkvz, beta_decay = (x.view(*x.shape[:2], self.key_heads, -1) for x in (qkvz, beta_decay))
        q, k, v, z = (x.flatten(2) for x in torch.split(qkvz, widths, -1))
        beta, decay = (x.flatten(2) for x in torch.split(beta_decay, ratio, -1))
        return torch.cat([q, k, v], -1), z, decay, beta
