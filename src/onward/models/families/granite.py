"""Granite 3 (arXiv 2405.04324): Llama with factors on embedding, residual branches, scores and logits."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import common_fields
from onward.models.fields import flag, positive_number

ARCHITECTURES = ("GraniteForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config)
    bias = flag(config, "attention_bias")
    scale = positive_number(config, "attention_multiplier", 1.0)
    layer = fields.layer(
        fields.attention(qkv_bias=bias, o_bias=bias, scale=scale),
        fields.feed_forward(bias=flag(config, "mlp_bias")),
        residual_multiplier=positive_number(config, "residual_multiplier", 1.0),
    )
    return fields.decoder(
        [layer] * fields.num_layers,
        embedding_multiplier=positive_number(config, "embedding_multiplier", 1.0),
        logits_multiplier=1 / positive_number(config, "logits_scaling", 1.0),
    )
