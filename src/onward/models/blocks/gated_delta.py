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
    """The weights of one layer, with projections in two matrices or in four. conv: of 2 G K + H V channels. log_rate,
    decay_bias: float32 [H]."""

    qkvz_proj: Linear | None
    beta_decay_proj: Linear | None
    qkv_proj: Linear | None
    z_proj: Linear | None
    decay_proj: Linear | None
    beta_proj: Linear | None
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

    def read(self, scope: WeightScope) -> GatedDeltaParams:
        heads, (keys, values) = self.value_heads, self.widths

        def linear(name: str, width: int, exists: bool) -> Linear | None:
            return scope.linear(name, width, self.hidden_size) if exists else None

        return GatedDeltaParams(
            qkvz_proj=linear("in_proj_qkvz", 2 * keys + 2 * values, self.fused),
            beta_decay_proj=linear("in_proj_ba", 2 * heads, self.fused),
            qkv_proj=linear("in_proj_qkv", 2 * keys + values, not self.fused),
            z_proj=linear("in_proj_z", values, not self.fused),
            decay_proj=linear("in_proj_a", heads, not self.fused),
            beta_proj=linear("in_proj_b", heads, not self.fused),
            conv=scope.short_conv("conv1d", 2 * keys + values, self.kernel_size),
            log_rate=scope.take_float32("A_log", heads),
            decay_bias=scope.take_float32("dt_bias", heads),
            norm=self.norm.read(scope.under("norm")),
            out_proj=scope.linear("out_proj", self.hidden_size, values),
        )

    def __call__(
        self, params: GatedDeltaParams, x_BTD: Tensor, positions: Positions, cache: LayerCache, index: int
    ) -> Tensor:
        if params.qkv_proj and params.z_proj and params.decay_proj and params.beta_proj:
            qkv, z = params.qkv_proj(x_BTD), params.z_proj(x_BTD)
            decay, beta = params.decay_proj(x_BTD), params.beta_proj(x_BTD)
        else:
            assert params.qkvz_proj is not None
            assert params.beta_decay_proj is not None
            qkv, z, decay, beta = self._split(params.qkvz_proj(x_BTD), params.beta_decay_proj(x_BTD))
        state = cache.state(index)
        rows = state.block_numbers, positions.offsets, state.rows
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
