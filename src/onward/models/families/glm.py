"""GLM-4 of 2024 and 2025 (arXiv 2406.12793): half of each head turns, as neighbouring pairs; gate and up in one matrix.

The later one, which its config calls GLM4, has norms after the blocks too.
"""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder, LayerNames
from onward.models.config import common_fields
from onward.models.fields import Overlaid, flag

ARCHITECTURES = ("GlmForCausalLM", "Glm4ForCausalLM")

_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True}
_GLM4_NAMES = LayerNames(mixer_post_norm="post_self_attn_layernorm", feed_forward_post_norm="post_mlp_layernorm")


def read_config(config: Mapping[str, Any]) -> Decoder:
    config = Overlaid(config, _DEFAULTS)
    fields = common_fields(config, partial_rotary=0.5, interleaved=True)
    attention = fields.attention(qkv_bias=flag(config, "attention_bias"))
    layer = fields.layer(attention, fields.feed_forward(fused=True))
    if config["architectures"] == ["Glm4ForCausalLM"]:
        norm = fields.norm()
        layer = fields.layer(
            attention,
            fields.feed_forward(fused=True),
            mixer_post_norm=norm,
            feed_forward_post_norm=norm,
            names=_GLM4_NAMES,
        )
    return fields.decoder([layer] * fields.num_layers)
