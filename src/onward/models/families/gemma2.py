"""Gemma 2 (arXiv 2408.00118): four norms a layer, a window in every other layer, capped scores and logits."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder, DecoderLayer, LayerNames
from onward.models.blocks.layer import Mixer, TokenBlock
from onward.models.config import (
    CommonFields,
    common_fields,
    every_nth_full,
    layer_types,
    layer_windows,
    sliding_window,
)
from onward.models.fields import Overlaid, flag, positive_number, softcap

ARCHITECTURES = ("Gemma2ForCausalLM",)

# What a config that does not name a field means. Files of the hub leave most of them out.
DEFAULTS = {
    "vocab_size": 256_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}
ACTIVATION: dict[str, Any] = {
    "activation_field": "hidden_activation",
    "activations": ("gelu_pytorch_tanh", "gelu", "silu"),
}
NAMES = LayerNames(
    mixer_post_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_post_norm="post_feedforward_layernorm",
)


def read_config(config: Mapping[str, Any]) -> Decoder:
    config = Overlaid(config, DEFAULTS)
    fields = common_fields(config, **ACTIVATION)
    bias = flag(config, "attention_bias")
    scale = positive_number(config, "query_pre_attn_scalar") ** -0.5
    cap = softcap(config, "attn_logit_softcapping", 50.0)
    windows = layer_windows(layer_types(config, every_nth_full(2, fields.num_layers)), sliding_window(config))
    return fields.decoder(
        (
            gemma_layer(
                fields,
                fields.attention(qkv_bias=bias, o_bias=bias, window=window, scale=scale, softcap=cap),
                fields.feed_forward(),
            )
            for window in windows
        ),
        **gemma_ends(fields, softcap(config, "final_logit_softcapping", 30.0)),
    )


def gemma_layer(fields: CommonFields, mixer: Mixer, feed_forward: TokenBlock) -> DecoderLayer:
    """A layer with a norm before and after each block, all of them with weights that are added to 1."""
    norm = fields.norm(offset=1.0)
    return DecoderLayer(mixer, feed_forward, norm, norm, norm, norm, names=NAMES)


def gemma_ends(fields: CommonFields, cap: float | None) -> dict[str, Any]:
    """The fields of a decoder that are not Llama's: what comes before its layers and after them."""
    return {
        "norm": fields.norm(offset=1.0),
        "embedding_multiplier": fields.hidden_size**0.5,
        "rounds_multiplier": True,
        "logits_softcap": cap,
    }
