"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219): fused projections, LongRoPE, and in Phi-4-mini heads turned in part."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import common_fields, sliding_window

ARCHITECTURES = ("Phi3ForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config, partial_rotary=1.0, default_eps=1e-5)
    attention = fields.attention(window=sliding_window(config, None), fused=True)
    layer = fields.layer(attention, fields.feed_forward(fused=True))
    return fields.decoder([layer] * fields.num_layers)
