"""Attention over a KV cache: grouped-query (arXiv 1706.03762, 2305.13245), and multi-head latent attention
(DeepSeek-V2, arXiv 2405.04434).

Shapes: B rows, T new tokens, D hidden_size, H query heads, G key/value heads, E head_dim. Latent attention: H heads,
K content_dim, E rotary_dim, R latent_dim, V value_dim.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.cache import LayerShape
from onward.models.architecture import WeightScope
from onward.models.blocks.layer import AttentionTemperature, LayerCache, Positions
from onward.models.blocks.norm import RMSNorm, read_norm, rms_normalize
from onward.models.linear import LatentLinear, Linear
from onward.models.rope import RotarySchedule


class AttentionParams(NamedTuple):
    """The weights of one layer's attention. qkv_proj: queries, keys and values in one matrix, where the checkpoint has
    it. k_proj, v_proj: None also where keys and values are shared. q_factor, k_factor: [heads, 1, E], which multiply
    queries and keys and change no score (`onward.models.key_balance`); no checkpoint has them."""

    qkv_proj: Linear | None
    q_proj: Linear | None
    k_proj: Linear | None
    v_proj: Linear | None
    o_proj: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None
    q_factor: Tensor | None = None
    k_factor: Tensor | None = None


@dataclass(frozen=True)
class AttentionNames:
    """The names of an attention's weights in a checkpoint."""

    o_proj: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"


@dataclass(frozen=True)
class Attention:
    """Attention of new tokens over a KV cache.

    rope: None for no rotation (NoPE). window: the positions that a token sees; None: all. scale: of the scores;
    head_dim ** -0.5 by default. softcap: of the scores (`ops.cached_attention`). q_norm, k_norm: of each head if as
    wide as a head, else of the whole projection. query_growth: a factor of queries by position. fused: the checkpoint
    has one `qkv_proj`. output_gate: `q_proj` has a gate beside each head's queries, whose sigmoid multiplies the head's
    output. sinks: each head has an extra score without a value (`ops.cached_attention`). v_norm: the eps of a norm of
    each head's values without weights. k_eq_v: values are the output of `k_proj`, before norm and RoPE.
    kv_source_layer: the cache index of the layer whose keys and values are shared; None: its own. input_size: of the
    projections' input; hidden_size by default.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RotarySchedule | None
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    query_growth: AttentionTemperature | None = None
    fused: bool = False
    output_gate: bool = False
    sinks: bool = False
    v_norm: float | None = None
    k_eq_v: bool = False
    kv_source_layer: int | None = None
    names: AttentionNames = AttentionNames()
    input_size: int | None = None

    @property
    def cached(self) -> LayerShape | None:
        if self.kv_source_layer is not None:
            return None
        return LayerShape(self.num_kv_heads, self.head_dim, self.head_dim, self.window)

    @property
    def widths(self) -> tuple[int, int, int]:
        """The number of features of queries, keys and values."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim

    def read(self, scope: WeightScope) -> AttentionParams:
        queries, keys, values = self.widths
        own_keys = self.kv_source_layer is None

        def linear(name: str, width: int, exists: bool) -> Linear | None:
            return scope.linear(name, width, self.input_size or self.hidden_size, self.qkv_bias) if exists else None

        return AttentionParams(
            qkv_proj=linear("qkv_proj", queries + keys + values, self.fused),
            q_proj=linear("q_proj", queries * (1 + self.output_gate), not self.fused),
            k_proj=linear("k_proj", keys, own_keys and not self.fused),
            v_proj=linear("v_proj", values, own_keys and not self.fused and not self.k_eq_v),
            o_proj=scope.linear(self.names.o_proj, self.hidden_size, queries, self.o_bias),
            q_norm=read_norm(self.q_norm, scope.under(self.names.q_norm)),
            k_norm=read_norm(self.k_norm if own_keys else None, scope.under(self.names.k_norm)),
            sinks=scope.take("sinks", self.num_heads) if self.sinks else None,
        )

    def __call__(
        self, params: AttentionParams, x_BTD: Tensor, positions: Positions, cache: LayerCache, index: int
    ) -> Tensor:
        q, k, v, gate = self._projected(params, x_BTD)
        q_BHTE = self._heads(q, self.q_norm, params.q_norm)
        k_BGTE = None if k is None else self._heads(k, self.k_norm, params.k_norm)
        v_BGTE = None if v is None else self._heads(v, None, None)
        if v_BGTE is not None and self.v_norm is not None:
            v_BGTE = rms_normalize(v_BGTE, self.v_norm)
        if params.q_factor is not None and params.k_factor is not None:
            q_BHTE = q_BHTE * params.q_factor
            k_BGTE = None if k_BGTE is None else k_BGTE * params.k_factor
        if self.query_growth is not None:
            q_BHTE = positions.scaled_by_position(q_BHTE, self.query_growth)
        if self.rope is not None:
            (cos, sin), interleaved = positions.angles(self.rope), self.rope.interleaved
            q_BHTE = ops.rotate(q_BHTE, cos, sin, interleaved=interleaved)
            k_BGTE = None if k_BGTE is None else ops.rotate(k_BGTE, cos, sin, interleaved=interleaved)
        source = index if self.kv_source_layer is None else self.kv_source_layer
        mixed = cache.attend(
            source, q_BHTE, k_BGTE, v_BGTE, positions.offsets,
            window=self.window, scale=self.scale, sinks=params.sinks, softcap=self.softcap,
        )  # fmt: skip
        out = mixed.transpose(1, 2).flatten(2)
        return params.o_proj(out if gate is None else ops.sigmoid_gate(gate, out))

    def _projected(
        self, params: AttentionParams, x_BTD: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Queries, keys and values [B, T, heads * E], and the gate of the output; None where absent."""
        if params.qkv_proj is not None:
            q, k, v = torch.split(params.qkv_proj(x_BTD), list(self.widths), dim=-1)
            return q, k, v, None
        assert params.q_proj is not None
        q, gate = params.q_proj(x_BTD), None
        if self.output_gate:
            q = q.view(*q.shape[:2], self.num_heads, -1)
            q, gate = (x.flatten(2) for x in torch.split(q, self.head_dim, -1))
        keys = None if params.k_proj is None else params.k_proj(x_BTD)
        values = keys if params.v_proj is None else params.v_proj(x_BTD)
        return q, keys, values, gate

    def _heads(self, x: Tensor, norm: RMSNorm | None, weight: Tensor | None) -> Tensor:
        """[B, T, heads * E] -> [B, heads, T, E], normalised by head or as a whole."""
        if norm is not None and weight is not None and norm.width != self.head_dim:
            x = norm(weight, x)
        heads = x.view(*x.shape[:-1], -1, self.head_dim)
        if norm is not None and weight is not None and norm.width == self.head_dim:
            heads = norm(weight, heads)
        return heads.transpose(1, 2)


_EPS = 1e-6  # of the norms of the query bottleneck and the latent; no config changes it


class LatentAttentionParams(NamedTuple):
    """The weights of one layer. q_a_proj and q_a_norm are None without a query bottleneck."""

    q_a_proj: Linear | None
    q_a_norm: Tensor | None
    q_proj: Linear
    kv_a_proj: Linear
    kv_a_norm: Tensor
    kv_b_proj: LatentLinear
    o_proj: Linear


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose cache holds, per token, one latent of R features and one rotated key of E features.

    Each head's keys (K features plus the rotated key) and values are linear in the latent. They are never
    materialised: a query is multiplied by its head's matrix and attends to the latents directly, and so is its output
    (the absorbed form of section 2.1.2). All heads then share one key of R + E features, whose first R are the value.
    Prompts take this form too, so that chunks and batches give the same bits; it costs (R + E) + R products per query
    and position instead of K + E + V (docs/families.md).

    query_rank: of the query bottleneck, if any. rotary_dim: E, of `rope`. scale: of the scores. bias: of the
    projections to the bottleneck and the latent, and of the output. query_growth: a factor of queries by position.
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    latent_dim: int
    content_dim: int
    rotary_dim: int
    value_dim: int
    rope: RotarySchedule
    scale: float
    bias: bool = False
    query_growth: AttentionTemperature | None = None

    @property
    def cached(self) -> LayerShape:
        return LayerShape(1, self.latent_dim + self.rotary_dim, 0)

    def read(self, scope: WeightScope) -> LatentAttentionParams:
        hidden, queries = self.hidden_size, self.num_heads * (self.content_dim + self.rotary_dim)
        q_a_proj = q_a_norm = None
        if self.query_rank is None:
            q_proj = scope.linear("q_proj", queries, hidden)
        else:
            q_a_proj = scope.linear("q_a_proj", self.query_rank, hidden, self.bias)
            q_a_norm = RMSNorm(self.query_rank, _EPS).read(scope.under("q_a_layernorm"))
            q_proj = scope.linear("q_b_proj", queries, self.query_rank)
        return LatentAttentionParams(
            q_a_proj=q_a_proj,
            q_a_norm=q_a_norm,
            q_proj=q_proj,
            kv_a_proj=scope.linear("kv_a_proj_with_mqa", self.latent_dim + self.rotary_dim, hidden, self.bias),
            kv_a_norm=RMSNorm(self.latent_dim, _EPS).read(scope.under("kv_a_layernorm")),
            kv_b_proj=scope.latent("kv_b_proj", self.num_heads, self.content_dim, self.value_dim, self.latent_dim),
            o_proj=scope.linear("o_proj", hidden, self.num_heads * self.value_dim, self.bias),
        )

    def __call__(
        self, params: LatentAttentionParams, x_BTD: Tensor, positions: Positions, cache: LayerCache, index: int
    ) -> Tensor:
        to_latent, to_values = params.kv_b_proj.parts
        query_input = x_BTD
        if self.query_rank is not None and params.q_a_proj is not None and params.q_a_norm is not None:
            query_input = RMSNorm(self.query_rank, _EPS)(params.q_a_norm, params.q_a_proj(x_BTD))
        queries = params.q_proj(query_input).view(*x_BTD.shape[:2], self.num_heads, -1)
        content_BTHK, rotary_BTHE = torch.split(queries, [self.content_dim, self.rotary_dim], -1)
        latent_BTR, key = torch.split(params.kv_a_proj(x_BTD), [self.latent_dim, self.rotary_dim], -1)
        latent_B1TR = RMSNorm(self.latent_dim, _EPS)(params.kv_a_norm, latent_BTR).unsqueeze(1)
        cos, sin = positions.angles(self.rope)
        rotated, key = (
            ops.rotate(x, cos, sin, interleaved=self.rope.interleaved)
            for x in (rotary_BTHE.transpose(1, 2), key.unsqueeze(1))
        )
        absorbed = ops.linear_by_head(content_BTHK, to_latent).transpose(1, 2)
        q_BHTX = torch.cat([absorbed, rotated], -1)
        if self.query_growth is not None:
            q_BHTX = positions.scaled_by_position(q_BHTX, self.query_growth)
        k_B1TX = torch.cat([latent_B1TR, key], -1)
        mixed_BHTR = cache.attend(
            index, q_BHTX, k_B1TX, None, positions.offsets, value_dim=self.latent_dim, scale=self.scale
        )
        return params.o_proj(ops.linear_by_head(mixed_BHTR.transpose(1, 2), to_values).flatten(2))
