"""Mixture of experts: a router sends each token through a few feed-forward blocks (arXiv 1701.06538, 2101.03961).

Shapes: E experts, C chosen per token, D hidden_size, I inner width of an expert.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.models.architecture import WeightScope
from onward.models.blocks.feed_forward import FeedForward, FeedForwardParams, UngatedFeedForward
from onward.models.blocks.norm import RMSNorm, rms_normalize
from onward.models.linear import ExpertLinear, Linear, Router
from onward.ops.experts import ExpertActivation


class ExpertsParams(NamedTuple):
    """The weights of one layer's router and experts. shared: as its block reads them. latent_down, latent_up: the
    projections to the experts' latent space and back."""

    router: Router
    choice_bias: Tensor | None
    gate_proj: ExpertLinear | None
    up_proj: ExpertLinear
    down_proj: ExpertLinear
    shared: Any
    shared_gate: Router | None = None
    latent_down: Linear | None = None
    latent_up: Linear | None = None


@dataclass(frozen=True)
class ExpertNames:
    """The names of the weights in a checkpoint. Expert e's matrices are below `experts`.e."""

    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    gate_proj: str = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    latent_down: str = "fc1_latent_proj"
    latent_up: str = "fc2_latent_proj"


@dataclass(frozen=True)
class Experts:
    """The weighted sum of `num_chosen` of `num_experts` feed-forward blocks, chosen by a router.

    score, normalize, scale, groups, kept_groups, group_best: as in `ops.top_experts`. sum_eps: added to the sum that
    normalises the weights, instead of the op's own. choice_bias: a learned bias helps to choose. float32_router: the
    router computes in float32. intermediate_size: of one expert. shared: a block for all tokens, added to the sum.
    shared_gate: its output is multiplied by the sigmoid of one more feature. activation, alpha, limit: as in
    `ops.experts`; "relu2" has no gate. router_bias, bias: of the router, and of the experts' matrices. latent_dim: the
    experts' input and output width, with linear projections from and to the hidden size; None: hidden_size.
    latent_bias: of these projections.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_chosen: int
    score: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    sum_eps: float | None = None
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    choice_bias: bool = False
    float32_router: bool = False
    shared: FeedForward | UngatedFeedForward | None = None
    shared_gate: bool = False
    activation: ExpertActivation = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0
    router_bias: bool = False
    bias: bool = False
    latent_dim: int | None = None
    latent_bias: bool = False
    names: ExpertNames = ExpertNames()

    def read(self, scope: WeightScope) -> ExpertsParams:
        hidden, inner, count = self.hidden_size, self.intermediate_size, self.num_experts
        width, has_gate = self.latent_dim or hidden, self.activation != "relu2"
        below, names = scope.under(self.names.experts), self.names
        if self.float32_router:
            router = Router(scope.under(names.router).take_float32("weight", count, hidden))
        else:
            router = scope.router(names.router, count, hidden, self.router_bias)
        return ExpertsParams(
            router=router,
            choice_bias=scope.take_float32(names.choice_bias, count) if self.choice_bias else None,
            gate_proj=below.experts(names.gate_proj, count, inner, width, self.bias) if has_gate else None,
            up_proj=below.experts(names.up_proj, count, inner, width, self.bias),
            down_proj=below.experts(names.down_proj, count, width, inner, self.bias),
            shared=None if self.shared is None else self.shared.read(scope.under(names.shared)),
            shared_gate=scope.router(names.shared_gate, 1, hidden) if self.shared_gate else None,
            latent_down=scope.linear(names.latent_down, width, hidden, self.latent_bias) if self.latent_dim else None,
            latent_up=scope.linear(names.latent_up, hidden, width, self.latent_bias) if self.latent_dim else None,
        )

    def __call__(self, params: ExpertsParams, x: Tensor) -> Tensor:
        chosen, shares = self.routed(params, x)
        mixed = self.mixed(params, x if params.latent_down is None else params.latent_down(x), chosen, shares)
        if params.latent_up is not None:
            mixed = params.latent_up(mixed)
        if self.shared is None or params.shared is None:
            return mixed
        shared = self.shared(params.shared, x)
        if params.shared_gate is not None:
            shared = ops.sigmoid_gate(params.shared_gate(x).expand_as(shared), shared)
        return ops.add(mixed, shared)

    def routed(self, params: ExpertsParams, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts chosen for x [..., D], and their weights (`ops.top_experts`)."""
        logits = params.router(x.to(torch.float32) if self.float32_router else x)
        by_op = self.sum_eps is None
        chosen, shares = ops.top_experts(
            logits, self.num_chosen, score=self.score, choice_bias=params.choice_bias, groups=self.groups,
            kept_groups=self.kept_groups, group_best=self.group_best, normalize=self.normalize and by_op,
            scale=self.scale if by_op else 1.0,
        )  # fmt: skip
        if self.sum_eps is not None:
            total = shares.sum(-1, keepdim=True) + self.sum_eps if self.normalize else 1.0
            shares = shares / total * self.scale
        return chosen, shares

    def mixed(self, params: ExpertsParams, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The sum of the chosen experts, [..., D]."""
        return params.down_proj.sum_of(
            x, chosen, shares, params.gate_proj, params.up_proj,
            activation=self.activation, alpha=self.alpha, limit=self.limit,
        )  # fmt: skip


class DenseAndExpertsParams(NamedTuple):
    """router_scale: [D], of the router's input. expert_scale: [E], of the experts' weights."""

    dense_norm: Tensor
    dense: FeedForwardParams
    dense_post_norm: Tensor
    router_scale: Tensor
    expert_scale: Tensor
    experts_norm: Tensor
    experts: ExpertsParams
    experts_post_norm: Tensor


@dataclass(frozen=True)
class DenseAndExperts:
    """A dense block in parallel with experts (Gemma 4), on the residual stream before any norm:

    norm_1(dense(norm(x))) + norm_2(experts(norm_3(x))).

    The router's input is x / rms(x) * router_scale * D ** -0.5; each expert's weight is multiplied by its scale.
    """

    dense: FeedForward
    experts: Experts
    norm: RMSNorm

    def read(self, scope: WeightScope) -> DenseAndExpertsParams:
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
        dense = self.dense(params.dense, self.norm(params.dense_norm, x))
        router_input = rms_normalize(x, self.norm.eps) * params.router_scale * x.shape[-1] ** -0.5
        chosen, shares = self.experts.routed(params.experts, router_input)
        scales = ops.embedding(chosen, params.expert_scale.unsqueeze(-1)).squeeze(-1)
        shares = shares * scales.to(torch.float32)
        mixed = self.experts.mixed(params.experts, self.norm(params.experts_norm, x), chosen, shares)
        return ops.add(self.norm(params.dense_post_norm, dense), self.norm(params.experts_post_norm, mixed))
