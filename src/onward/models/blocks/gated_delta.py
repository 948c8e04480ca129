"""Gated DeltaNet (arXiv 2412.06464): a mixer that keeps a state of a fixed size instead of keys and values.

Shapes: B rows, T new tokens, D hidden_size, G key heads of K features, H value heads of V features.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.cache import KVCache, PagedKVCache, StateShape
from onward.models.architecture import WeightScope
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
    """The same where a checkpoint has the projections in two matrices."""

    qkvz_proj: Linear
    beta_decay_proj: Linear
    conv: ShortConv
    log_rate: Tensor
    decay_bias: Tensor
    norm: Tensor
    out_proj: Linear


@dataclass(frozen=True)
class GatedDelta:
    """Queries, keys and values go through a short convolution and the gated delta rule. What is read from the state is
    normalised by head and multiplied by silu(z).

    norm: of a value head. fused: whether the checkpoint has `in_proj_qkvz` and `in_proj_ba`, in which the parts of a
    key head lie together.
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm: RMSNorm
    fused: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """How many features all queries have, as all keys do, and all values."""
        return self.key_heads * self.key_dim, self.value_heads * self.value_dim

    rope: ClassVar[None] = None
    reads: ClassVar[None] = None
    window: ClassVar[None] = None

    @property
    def cached(self) -> StateShape:
        """What it keeps of a text."""
        keys, values = self.widths
        return StateShape(2 * keys + values, self.taps, self.value_heads, state_width(self.key_dim, self.value_dim))

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
            scope.short_conv("conv1d", 2 * keys + values, self.taps),
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
        cache: KVCache | PagedKVCache,
        index: int,
    ) -> Tensor:
        """index: the layer's place among the recurrent layers of the cache."""
        if isinstance(params, FusedGatedDeltaParams):
            qkv, z, decay, beta = self._taken_apart(params.qkvz_proj(x_BTD), params.beta_decay_proj(x_BTD))
        else:
            qkv, z = params.qkv_proj(x_BTD), params.z_proj(x_BTD)
            decay, beta = params.decay_proj(x_BTD), params.beta_proj(x_BTD)
        kept = cache.state(index)
        where = kept.block_numbers, positions.offsets, kept.rows
        mixed = ops.short_conv(qkv, params.conv.by_tap, kept.inputs, *where)
        out_BTHV = ops.gated_delta(
            mixed, decay, beta, params.log_rate, params.decay_bias, kept.state, *where,
            key_heads=self.key_heads, key_dim=self.key_dim,
        )  # fmt: skip
        return params.out_proj(ops.swiglu(z, self.norm(params.norm, out_BTHV).flatten(2)))

    def _taken_apart(self, qkvz: Tensor, beta_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The parts of the fused projections, in which those of a key head lie together."""
        of_group = self.value_heads // self.key_heads
        widths = [self.key_dim, self.key_dim, of_group * self.value_dim, of_group * self.value_dim]
        qkvz, beta_decay = (x.view(*x.shape[:2], self.key_heads, -1) for x in (qkvz, beta_decay))
        q, k, v, z = (x.flatten(2) for x in torch.split(qkvz, widths, -1))
        beta, decay = (x.flatten(2) for x in torch.split(beta_decay, of_group, -1))
        return torch.cat([q, k, v], -1), z, decay, beta
