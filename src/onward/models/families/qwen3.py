"""Qwen3 (arXiv 2505.09388): grouped heads, a norm on every query and key head, no biases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import common_fields, qwen_windows
from onward.models.fields import flag

ARCHITECTURES = ("Qwen3ForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    # A Qwen3 config without head_dim means 128, not hidden_size / heads.
    fields = common_fields(config, default_head_dim=128)
    bias = flag(config, "attention_bias")
    norm = fields.norm(fields.head_dim)
    attention = fields.attention(qkv_bias=bias, o_bias=bias, q_norm=norm, k_norm=norm)
    return fields.decoder(
        fields.layer(replace(attention, window=window), fields.feed_forward())
        for window in qwen_windows(config, fields.num_layers)
    )
