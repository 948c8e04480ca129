"""Mixtral (arXiv 2401.04088): Mistral with experts in every layer."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder, ExpertNames, Experts, LayerNames
from onward.models.config import common_fields
from onward.models.expert_fields import experts_per_token
from onward.models.fields import positive_int

ARCHITECTURES = ("MixtralForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config, default_eps=1e-5)
    window = positive_int(config, "sliding_window") if config.get("sliding_window") is not None else None
    count = positive_int(config, "num_local_experts", 8)
    experts = Experts(
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_experts=count,
        num_chosen=experts_per_token(config, count, default=2),
        normalize=True,
        names=ExpertNames(gate_proj="w1", up_proj="w3", down_proj="w2"),
    )
    layer = fields.layer(fields.attention(window=window), experts, names=LayerNames(feed_forward="block_sparse_moe"))
    return fields.decoder([layer] * fields.num_layers)
