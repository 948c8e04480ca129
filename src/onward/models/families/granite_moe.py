"""Granite 3 with experts: shares by softmax of the chosen; newer ones have a block of all tokens beside them."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder, ExpertNames, Experts, FeedForward, FeedForwardNames, LayerNames
from onward.models.config import CommonFields, common_fields
from onward.models.expert_fields import experts_per_token
from onward.models.families.granite import granite_attention, granite_decoder
from onward.models.fields import positive_int

_WITHOUT_SHARED = "GraniteMoeForCausalLM"
ARCHITECTURES = (_WITHOUT_SHARED, "GraniteMoeSharedForCausalLM")


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config)
    without = config["architectures"] == [_WITHOUT_SHARED] or not config.get("shared_intermediate_size")
    experts = granite_experts(config, fields, None if without else shared_block(config, fields))
    layer = granite_attention(config, fields), experts, {"names": LayerNames(feed_forward="")}
    return granite_decoder(config, fields, [layer] * fields.num_layers)


def shared_block(config: Mapping[str, Any], fields: CommonFields) -> FeedForward:
    """The feed-forward block of all tokens."""
    return fields.feed_forward(
        intermediate_size=positive_int(config, "shared_intermediate_size", 1024),
        fused=True,
        names=FeedForwardNames(gate_up_proj="input_linear", down_proj="output_linear"),
    )


def granite_experts(config: Mapping[str, Any], fields: CommonFields, shared: FeedForward | None) -> Experts:
    """The experts of this family and its kin. shared: the block of all tokens."""
    count = positive_int(config, "num_local_experts", 8)
    return Experts(
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_experts=count,
        num_chosen=experts_per_token(config, count, default=2),
        score="softmax_of_chosen",
        shared=shared,
        names=ExpertNames("block_sparse_moe.router.layer", experts="block_sparse_moe.experts", shared="shared_mlp"),
    )
