"""The pre-norm decoder that Qwen, Llama and Mistral share, as a pure function.

Shapes: B rows, T new tokens, D hidden_size, H heads, G key/value heads, E head_dim, V vocabulary.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.cache import KVBlocks, KVCache, PagedKVCache
from onward.models.config import DecoderConfig
from onward.models.contract import take_positions
from onward.models.model import Model


class Linear(NamedTuple):
    """A linear layer: weight [out, in], stock or packed, and in some families bias [out]."""

    weight: ops.Weight
    bias: Tensor | None = None


class LayerParams(NamedTuple):
    """The weights of one layer. q_norm and k_norm [E] are None in families without them.

    post_attention_norm has the checkpoint's name: it is applied after the attention's residual sum, before the MLP.
    """

    input_norm: Tensor
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_attention_norm: Tensor
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


class DecoderParams(NamedTuple):
    """All weights. A tied head is the embedding itself: one weight under two names."""

    embed_tokens: ops.Table
    layers: tuple[LayerParams, ...]
    norm: Tensor
    lm_head: ops.Weight


def decoder_forward(
    config: DecoderConfig,
    tokens: Tensor,
    offsets: Tensor,
    cache: KVCache | PagedKVCache,
    params: DecoderParams,
    *,
    logits_at: Tensor | None = None,
) -> tuple[Tensor, KVCache | PagedKVCache]:
    """The forward of `onward.models.model`; `config` is static and bound with `functools.partial`."""
    positions = offsets.unsqueeze(1) + torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    cos, sin = config.rope.angles(positions)
    x_BTD = ops.embedding(tokens, params.embed_tokens)
    for index, layer in enumerate(params.layers):
        x_BTD = ops.add(x_BTD, _attention(config, layer, index, x_BTD, offsets, cos, sin, cache))
        x_BTD = ops.add(x_BTD, _feed_forward(config, layer, x_BTD))
    if logits_at is not None:
        x_BTD = take_positions(x_BTD, logits_at)
    return ops.linear(ops.rms_norm(x_BTD, params.norm, eps=config.rms_norm_eps), params.lm_head), cache


def _attention(
    config: DecoderConfig,
    layer: LayerParams,
    index: int,
    x_BTD: Tensor,
    offsets: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: KVCache | PagedKVCache,
) -> Tensor:
    normed = ops.rms_norm(x_BTD, layer.input_norm, eps=config.rms_norm_eps)
    q_BHTE = _heads(ops.linear(normed, *layer.q_proj), config.head_dim, layer.q_norm, config.rms_norm_eps)
    k_BGTE = _heads(ops.linear(normed, *layer.k_proj), config.head_dim, layer.k_norm, config.rms_norm_eps)
    v_BGTE = _heads(ops.linear(normed, *layer.v_proj), config.head_dim, None, config.rms_norm_eps)
    q_BHTE, k_BGTE = ops.rotate(q_BHTE, cos, sin), ops.rotate(k_BGTE, cos, sin)
    mixed = cache.attend(index, q_BHTE, k_BGTE, v_BGTE, offsets, window=config.windows[index])
    return ops.linear(mixed.transpose(1, 2).flatten(2), *layer.o_proj)


def _heads(x: Tensor, head_dim: int, norm: Tensor | None, eps: float) -> Tensor:
    """[B, T, heads * E] -> [B, heads, T, E], each head normalised if there is a norm."""
    heads = x.view(*x.shape[:-1], -1, head_dim)
    if norm is not None:
        heads = ops.rms_norm(heads, norm, eps=eps)
    return heads.transpose(1, 2)


def _feed_forward(config: DecoderConfig, layer: LayerParams, x_BTD: Tensor) -> Tensor:
    normed = ops.rms_norm(x_BTD, layer.post_attention_norm, eps=config.rms_norm_eps)
    gated = ops.swiglu(ops.linear(normed, *layer.gate_proj), ops.linear(normed, *layer.up_proj))
    return ops.linear(gated, *layer.down_proj)


def decoder_model(config: DecoderConfig, params: DecoderParams, max_seq_len: int | None = None) -> Model:
    """A `Model` of this decoder over `params`, stock or packed, on their device and in their dtype."""
    placed = params.embed_tokens.dtype, params.embed_tokens.device
    return Model(
        forward=partial(decoder_forward, config),
        params=params,
        new_cache=partial(_new_cache, config, *placed),
        vocab_size=config.vocab_size,
        max_seq_len=max_seq_len or config.max_position_embeddings,
        selects_logits=True,
        device=params.embed_tokens.device,
        num_parameters=config.num_parameters,
        new_blocks=partial(_new_blocks, config, *placed),
    )


def _new_cache(config: DecoderConfig, dtype: torch.dtype, device: torch.device, batch: int, max_len: int) -> KVCache:
    return KVCache.new(
        num_layers=config.num_layers,
        batch=batch,
        num_kv_heads=config.num_kv_heads,
        max_len=max_len,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )


def _new_blocks(config: DecoderConfig, dtype: torch.dtype, device: torch.device, count: int) -> KVBlocks:
    return KVBlocks.new(
        num_layers=config.num_layers,
        count=count,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
