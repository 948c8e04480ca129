"""Mixers that cache a recurrent state of fixed size instead of keys and values: Gated DeltaNet (arXiv 2412.06464),
Mamba2 (arXiv 2405.21060) and gated short convolutions (LFM2, arXiv 2511.23404), whose state is their last inputs; and
Mamba2 in parallel with attention (Falcon-H1, arXiv 2507.22448).

Shapes: B rows, T new tokens, D hidden_size. Gated DeltaNet: G key heads of K features, H value heads of V features.
Mamba2: H heads of P features, G groups of heads, N state features.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.cache import StateShape
from onward.models.architecture import WeightScope
from onward.models.blocks.attention import Attention, AttentionParams
from onward.models.blocks.layer import AttentionAndState, LayerCache, Positions
from onward.models.blocks.norm import RMSNorm, multiplied, read_norm
from onward.models.linear import Linear, ShortConv
from onward.models.rope import RotarySchedule
from onward.ops.gated_delta import state_width
from onward.ops.ssd import ssd_state_width


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

    rope: ClassVar[None] = None

    @property
    def widths(self) -> tuple[int, int]:
        """The number of features of all queries (and of all keys), and of all values."""
        return self.key_heads * self.key_dim, self.value_heads * self.value_dim

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

    rope: ClassVar[None] = None

    @property
    def widths(self) -> tuple[int, int, int, int, int]:
        """The number of features of z, x, b, c and dt."""
        inner, keys = self.num_heads * self.head_dim, self.groups * self.state_dim
        return inner, inner, keys, keys, self.num_heads

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


class ParallelMixerParams(NamedTuple):
    attention: AttentionParams
    recurrent: Mamba2Params


@dataclass(frozen=True)
class ParallelMixer:
    """The sum of attention and Mamba2 on the same input. attention_in, attention_out, recurrent_out: factors of
    attention's input and output, and of Mamba2's output."""

    attention: Attention
    recurrent: Mamba2
    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_out: float = 1.0

    @property
    def cached(self) -> AttentionAndState:
        assert self.attention.cached is not None
        return AttentionAndState(self.attention.cached, self.recurrent.cached)

    @property
    def rope(self) -> RotarySchedule | None:
        return self.attention.rope

    def read(self, scope: WeightScope) -> ParallelMixerParams:
        return ParallelMixerParams(
            self.attention.read(scope.under("self_attn")), self.recurrent.read(scope.under("mamba"))
        )

    def __call__(
        self,
        params: ParallelMixerParams,
        x_BTD: Tensor,
        positions: Positions,
        cache: LayerCache,
        index: tuple[int, int],
    ) -> Tensor:
        place, state = index
        recurrent = self.recurrent(params.recurrent, x_BTD, positions, cache, state)
        attended = self.attention(params.attention, multiplied(x_BTD, self.attention_in), positions, cache, place)
        return ops.add(multiplied(recurrent, self.recurrent_out), multiplied(attended, self.attention_out))
