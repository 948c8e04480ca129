"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783); `onward.models.rope` has Llama 3.1's RoPE scaling."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import common_fields
from onward.models.fields import flag

ARCHITECTURES = ("LlamaForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config)
    bias = flag(config, "attention_bias")
    attention = fields.attention(qkv_bias=bias, o_bias=bias)
    layer = fields.layer(attention, fields.feed_forward(bias=flag(config, "mlp_bias")))
    return fields.decoder([layer] * fields.num_layers)
