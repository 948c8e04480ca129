"""Qwen2 and Qwen2.5 (arXiv 2407.10671): biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import common_fields, qwen_windows

ARCHITECTURES = ("Qwen2ForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config)
    windows = qwen_windows(config, fields.num_layers)
    return fields.decoder(
        fields.layer(fields.attention(qkv_bias=True, window=window), fields.feed_forward()) for window in windows
    )
