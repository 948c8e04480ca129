"""Mistral (arXiv 2310.06825): a sliding window in every layer, or in those that `layer_types` names."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import common_fields, layer_types, layer_windows, sliding_window

ARCHITECTURES = ("MistralForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config)
    window = sliding_window(config)
    kind = "full_attention" if window is None else "sliding_attention"
    windows = layer_windows(layer_types(config, [kind] * fields.num_layers), window)
    return fields.decoder(fields.layer(fields.attention(window=own), fields.feed_forward()) for own in windows)
