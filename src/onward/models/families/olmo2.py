"""OLMo 2 (arXiv 2501.00656): norms after the blocks alone, and of whole queries and keys."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Attention, Decoder, DecoderLayer, LayerNames
from onward.models.config import CommonFields, common_fields
from onward.models.fields import Overlaid, flag

ARCHITECTURES = ("Olmo2ForCausalLM",)

DEFAULTS = {"rms_norm_eps": 1e-5}
NAMES = LayerNames(
    mixer_post_norm="post_attention_layernorm",
    feed_forward_post_norm="post_feedforward_layernorm",
)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(Overlaid(config, DEFAULTS))
    layer = olmo_layer(fields, olmo_attention(config, fields))
    return fields.decoder([layer] * fields.num_layers, norm=fields.norm(after_cast=False))


def olmo_attention(config: Mapping[str, Any], fields: CommonFields) -> Attention:
    bias = flag(config, "attention_bias")
    q_norm = fields.norm(fields.num_heads * fields.head_dim, after_cast=False)
    k_norm = fields.norm(fields.num_kv_heads * fields.head_dim, after_cast=False)
    return fields.attention(qkv_bias=bias, o_bias=bias, q_norm=q_norm, k_norm=k_norm)


def olmo_layer(fields: CommonFields, attention: Attention) -> DecoderLayer:
    norm = fields.norm(after_cast=False)
    return DecoderLayer(
        attention, fields.feed_forward(), mixer_post_norm=norm, feed_forward_post_norm=norm, names=NAMES
    )
