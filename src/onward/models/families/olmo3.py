"""OLMo 3 (arXiv 2512.13961): OLMo 2 with a window in three of four layers; scaled RoPE only in the others."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import (
    common_fields,
    every_nth_full,
    layer_types,
    layer_windows,
    ropes_by_type,
    sliding_window,
)
from onward.models.families.olmo2 import DEFAULTS, olmo_attention, olmo_layer
from onward.models.fields import Overlaid
from onward.models.rope import rotary_schedule

ARCHITECTURES = ("Olmo3ForCausalLM",)

_BASE = 500_000.0


def read_config(config: Mapping[str, Any]) -> Decoder:
    ropes = ropes_by_type(config)
    full = {"rope_parameters": ropes.get("full_attention", {})}
    fields = common_fields(Overlaid(full, config, DEFAULTS), default_base=_BASE)
    # Where rope_parameters has no object for each type of layer, rope_theta is everyone's and rope_scaling is not.
    theta = {} if ropes else {"rope_theta": config.get("rope_theta")}
    sliding = theta | {"rope_parameters": ropes.get("sliding_attention")}
    local = rotary_schedule(sliding, fields.head_dim, fields.max_position_embeddings, base=_BASE)
    attention = olmo_attention(config, fields)
    types = layer_types(config, every_nth_full(4, fields.num_layers))
    windows = layer_windows(types, sliding_window(config))
    return fields.decoder(
        (
            olmo_layer(
                fields, replace(attention, window=window, rope=fields.rope if kind == "full_attention" else local)
            )
            for kind, window in zip(types, windows, strict=True)
        ),
        norm=fields.norm(after_cast=False),
    )
