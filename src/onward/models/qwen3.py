"""Qwen3 (arXiv 2505.09388): grouped heads, a norm on every query and key head, no biases."""

from collections.abc import Mapping
from typing import Any

from onward.models.config import DecoderConfig, common_fields, qwen_windows
from onward.models.fields import flag

ARCHITECTURE = "Qwen3ForCausalLM"


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    # A Qwen3 config without head_dim means 128, not hidden_size / heads.
    fields = common_fields(config, default_head_dim=128)
    bias = flag(config, "attention_bias")
    windows = qwen_windows(config, fields["num_layers"])
    return DecoderConfig(**fields, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True)
