"""Mixtures of experts of a hosted module, under our name in the registry of transformers: no shape depends on a value.

Shapes: N tokens, K experts a token, E experts, D hidden_size, I intermediate size.
"""

from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from onward.models.hosted.library import NAME, library

# Tokens whose experts' matrices are copied at once.
_MOST_TOKENS = 16


@once
def register() -> None:
    """Tell transformers of our experts, once."""
    library("integrations.moe").ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)


def run_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum the chosen experts of each token, in the order in which they were chosen.

    Args:
        hidden_states: [N, D]. top_k_index: int [N, K]. top_k_weights: [N, K].
    """
    given = (hidden_states, top_k_index, top_k_weights)
    outputs = [
        _run_few(self, *piece) for piece in zip(*(torch.split(each, _MOST_TOKENS) for each in given), strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _run_few(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    total = None
    for choice in range(index.shape[1]):
        expert = index[:, choice]
        if self.has_gate:
            up = self._apply_gate(_product(self, "gate_up_proj", expert, x))
        else:
            up = self.act_fn(_product(self, "up_proj", expert, x))
        out = _product(self, "down_proj", expert, up)
        if self.has_post_expert_norm:
            out = self.post_expert_norm(out)
        weighted = (out * weights[:, choice].unsqueeze(-1)).to(x.dtype)
        total = weighted if total is None else total + weighted
    assert total is not None, "a token has one expert or more"
    return total


def _product(self: Any, name: str, expert: Tensor, x: Tensor) -> Tensor:
    """x [N, K] times the matrix of each token's expert -> [N, M]."""
    weights = getattr(self, name)[expert]
    out: Tensor = x.unsqueeze(1) @ (weights if self.is_transposed else weights.transpose(1, 2))
    out = out.squeeze(1)
    if self.has_bias:
        out = out + getattr(self, f"{name}_bias")[expert]
    return out
