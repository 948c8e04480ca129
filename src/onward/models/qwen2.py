"""Qwen2 and Qwen2.5 (arXiv 2407.10671): biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from onward.models.config import DecoderConfig, common_fields, qwen_windows

ARCHITECTURE = "Qwen2ForCausalLM"


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    fields = common_fields(config)
    return DecoderConfig(**fields, windows=qwen_windows(config, fields["num_layers"]), qkv_bias=True)
