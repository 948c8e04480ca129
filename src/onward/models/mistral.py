"""Mistral (arXiv 2310.06825): a sliding window in every layer, if the config has one."""

from collections.abc import Mapping
from typing import Any

from onward.models.config import DecoderConfig, common_fields, sliding_window

ARCHITECTURE = "MistralForCausalLM"


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    fields = common_fields(config)
    return DecoderConfig(**fields, windows=(sliding_window(config),) * fields["num_layers"])
