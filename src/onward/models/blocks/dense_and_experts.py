"""A dense block and a mixture of experts side by side, each with norms of its own (Gemma 4).

Shapes: E experts, C chosen of them for each token, D width of the stream.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.models.blocks.experts import Experts, ExpertsParams
from onward.models.blocks.feed_forward import FeedForward, FeedForwardParams, FusedFeedForwardParams
from onward.models.blocks.norm import RMSNorm, over_rms
from onward.models.scope import Scope


class DenseAndExpertsParams(NamedTuple):
    """router_scale: [D], of what the router reads. expert_scale: [E], of the experts' weights."""

    dense_norm: Tensor
    dense: FeedForwardParams | FusedFeedForwardParams
    dense_post_norm: Tensor
    router_scale: Tensor
    expert_scale: Tensor
    experts_norm: Tensor
    experts: ExpertsParams
    experts_post_norm: Tensor


@dataclass(frozen=True)
class DenseAndExperts:
    """norm_1(dense(norm(x))) + norm_2(experts(norm_3(x))), of the stream as it is before a norm.

    The router reads x / rms(x) * router_scale * D ** -0.5; what it gives of each expert is multiplied by that expert's
    scale. norm: of each of the four norms.
    """

    dense: FeedForward
    experts: Experts
    norm: RMSNorm

    def read(self, scope: Scope) -> DenseAndExpertsParams:
        width, count = self.experts.hidden_size, self.experts.num_experts
        return DenseAndExpertsParams(
            dense_norm=self.norm.read(scope.under("pre_feedforward_layernorm")),
            dense=self.dense.read(scope.under("mlp")),
            dense_post_norm=self.norm.read(scope.under("post_feedforward_layernorm_1")),
            router_scale=scope.take("router.scale", width),
            expert_scale=scope.take("router.per_expert_scale", count),
            experts_norm=self.norm.read(scope.under("pre_feedforward_layernorm_2")),
            experts=self.experts.read(scope),
            experts_post_norm=self.norm.read(scope.under("post_feedforward_layernorm_2")),
        )

    def __call__(self, params: DenseAndExpertsParams, x: Tensor) -> Tensor:
        """float [..., D] -> [..., D]."""
        dense = self.dense(params.dense, self.norm(params.dense_norm, x))
        direction = over_rms(x, self.norm.eps)
        chosen, shares = self.experts.routed(params.experts, direction * params.router_scale * x.shape[-1] ** -0.5)
        scales = ops.embedding(chosen, params.expert_scale.unsqueeze(-1)).squeeze(-1)
        shares = shares * scales.to(torch.float32)
        mixed = self.experts.mixed(params.experts, self.norm(params.experts_norm, x), chosen, shares)
        return ops.add(self.norm(params.dense_post_norm, dense), self.norm(params.experts_post_norm, mixed))
