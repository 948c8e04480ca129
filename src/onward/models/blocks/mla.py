"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

Shapes: B rows, T new tokens, D hidden_size, H heads, K content_dim, E rotary_dim, R latent_dim, V value_dim.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.cache import LayerShape
from onward.models.architecture import WeightScope
from onward.models.blocks.layer import LayerCache
from onward.models.blocks.norm import RMSNorm
from onward.models.blocks.positions import AttentionTemperature, Positions
from onward.models.linear import LatentLinear, Linear
from onward.models.rope import RotarySchedule

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

    kv_source_layer: ClassVar[None] = None
    window: ClassVar[None] = None

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
        mixed_BHTR = cache.attend(index, q_BHTX, k_B1TX, self.latent_dim, positions.offsets, scale=self.scale)
        return params.o_proj(ops.linear_by_head(mixed_BHTR.transpose(1, 2), to_values).flatten(2))
