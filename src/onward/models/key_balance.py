"""Keys whose features have like magnitudes, for caches that round a whole row in equal steps.

A key's largest feature sets the step of its row, and some models have features a hundred times the others: Qwen2's keys
have biases of that size. Dividing a feature of the keys by its usual magnitude, and multiplying that of the queries by
it (SmoothQuant's exchange, arXiv 2211.10438), leaves their products as they are. The factors are powers of two, so that
no product changes a bit; the two features that RoPE rotates into each other have one factor.
"""

from typing import Any

import torch
from torch import Tensor

from onward.models.architecture import Architecture
from onward.models.blocks import Attention, Decoder, RMSNorm
from onward.models.blocks.attention import AttentionParams
from onward.models.linear import Linear, float_weight


def balanced_keys(architecture: Architecture, params: Any) -> Any:
    """The params with balanced keys in each `Attention` whose weights tell the magnitudes of its keys.

    Other layers stay as they are, and so do models in which layers share keys, and those of other forwards.
    """
    if not isinstance(architecture, Decoder) or architecture.sharing:
        return params
    layers = []
    for layer, own in zip(architecture.layers, params.layers, strict=True):
        if isinstance(layer.mixer, Attention):
            own = own._replace(mixer=_balanced(layer.mixer, own.mixer, layer.mixer_norm, own.mixer_norm))
        layers.append(own)
    return params._replace(layers=tuple(layers))


def _balanced(
    block: Attention, params: AttentionParams, norm: RMSNorm | None, weight: Tensor | None
) -> AttentionParams:
    if block.k_norm is not None:
        if (
            params.k_norm is None
            or params.q_norm is None
            or block.k_norm.width != block.head_dim
            or block.k_norm.offset
        ):
            return params
        factors = _factors(block, params.k_norm.float().abs().unsqueeze(0))[0].to(params.k_norm.dtype)
        return params._replace(q_norm=params.q_norm * factors, k_norm=params.k_norm / factors)
    gain = 1.0 if norm is None or weight is None else (weight.float() + norm.offset).square().mean().sqrt().item()
    projection, first = (params.k_proj, 0) if params.qkv_proj is None else (params.qkv_proj, block.widths[0])
    if not isinstance(projection, Linear):
        return params
    rows = slice(first, first + block.widths[1])
    squares = (float_weight(projection.weight).float()[rows].square().sum(1)) * gain**2
    if projection.bias is not None:
        squares += projection.bias[rows].float().square()
    factors = _factors(block, squares.sqrt().view(block.num_kv_heads, block.head_dim))
    dtype = weight.dtype if weight is not None else torch.float32
    of_queries = factors.repeat_interleave(block.num_heads // block.num_kv_heads, 0)
    return params._replace(q_factor=of_queries.unsqueeze(1).to(dtype), k_factor=(1 / factors).unsqueeze(1).to(dtype))


def _factors(block: Attention, magnitudes: Tensor) -> Tensor:
    """The powers of two nearest to the magnitudes [G, E], one for both features of a rotated pair."""
    if block.rope is not None:
        rotated, others = magnitudes[:, : block.rope.dims].contiguous(), magnitudes[:, block.rope.dims :]
        pairs = rotated.view(len(rotated), *((-1, 2) if block.rope.interleaved else (2, -1)))
        largest = pairs.amax(2 if block.rope.interleaved else 1, keepdim=True).expand_as(pairs)
        magnitudes = torch.cat([largest.flatten(1), others], 1)
    mean = magnitudes.clamp(min=1e-6).log2().mean()
    return torch.exp2((magnitudes.clamp(min=1e-6).log2() - mean).round())
