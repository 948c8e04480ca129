"""Mistral (arXiv 2310.06825): a sliding window in every layer, if the config has one."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import common_fields, sliding_window

ARCHITECTURES = ("MistralForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config)
    layer = fields.layer(fields.attention(window=sliding_window(config)), fields.feed_forward())
    return fields.decoder([layer] * fields.num_layers)
