"""LFM2's mixtures of experts (arXiv 2511.23404): experts by sigmoids in all layers but the first."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder, ExpertNames, Experts
from onward.models.expert_fields import experts_per_token, num_dense_layers
from onward.models.families.lfm2 import FEED_FORWARD, conv_decoder, conv_fields
from onward.models.fields import flag, positive_int, positive_number

ARCHITECTURES = ("Lfm2MoeForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = conv_fields(config)
    count = positive_int(config, "num_experts", 32)
    experts = Experts(
        hidden_size=fields.hidden_size,
        intermediate_size=positive_int(config, "moe_intermediate_size", 1792),
        num_experts=count,
        num_chosen=experts_per_token(config, count, default=4),
        score="sigmoid",
        normalize=flag(config, "norm_topk_prob", default=True),
        sum_eps=1e-6,
        scale=positive_number(config, "routed_scaling_factor", 1.0),
        choice_bias=flag(config, "use_expert_bias", default=True),
        names=ExpertNames(choice_bias="expert_bias", gate_proj="w1", up_proj="w3", down_proj="w2"),
    )
    first = num_dense_layers(config, 2, "num_dense_layers")
    feed_forward = fields.feed_forward(names=FEED_FORWARD)
    return conv_decoder(config, fields, [feed_forward if i < first else experts for i in range(fields.num_layers)])
