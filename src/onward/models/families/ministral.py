"""Ministral: a sliding window in some layers. Ministral 3: YaRN, with queries that grow with the position."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onward.models.blocks import Decoder, QueryGrowth
from onward.models.config import check_layer_types, common_fields, sliding_window
from onward.models.fields import positive_number
from onward.models.rope import RotarySchedule, rope_fields

ARCHITECTURES = ("MinistralForCausalLM", "Ministral3ForCausalLM")


def read_config(config: Mapping[str, Any]) -> Decoder:
    third = config["architectures"] == ["Ministral3ForCausalLM"]
    if third:
        fields = common_fields(config, default_head_dim=128, default_eps=1e-5, rope_also=("llama_4_scaling_beta",))
        attention = fields.attention(query_growth=query_growth(config, fields.rope))
    else:
        fields = common_fields(config)
        attention = fields.attention()
    window = sliding_window(config, None if third else 4096)
    types = None if third else config.get("layer_types")
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * fields.num_layers
    check_layer_types(types, fields.num_layers)
    return fields.decoder(
        fields.layer(replace(attention, window=window if kind == "sliding_attention" else None), fields.feed_forward())
        for kind in types
    )


def query_growth(config: Mapping[str, Any], rope: RotarySchedule) -> QueryGrowth | None:
    """The growth of queries that the RoPE object names, if any."""
    beta = rope_fields(config).get("llama_4_scaling_beta")
    if not beta:
        return None
    beta = positive_number({"llama_4_scaling_beta": beta}, "llama_4_scaling_beta")
    return QueryGrowth(beta, rope.scaling.original_max_position)
