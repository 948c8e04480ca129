"""Seed-OSS: Llama with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import common_fields
from onward.models.fields import Overlaid, flag

ARCHITECTURES = ("SeedOssForCausalLM",)

_DEFAULTS = {"head_dim": 128, "attention_bias": True}


def read_config(config: Mapping[str, Any]) -> Decoder:
    config = Overlaid(config, _DEFAULTS)
    fields = common_fields(config)
    attention = fields.attention(qkv_bias=flag(config, "attention_bias"), o_bias=flag(config, "attention_out_bias"))
    layer = fields.layer(attention, fields.feed_forward(bias=flag(config, "mlp_bias")))
    return fields.decoder([layer] * fields.num_layers)
