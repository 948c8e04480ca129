"""GLM-4.5 and 4.6 (arXiv 2508.06471): half of each head turns; experts with DeepSeek-V3's router (arXiv 2412.19437)."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder, Experts
from onward.models.config import common_fields
from onward.models.expert_fields import expert_groups, experts_per_token
from onward.models.fields import flag, positive_int, positive_number

ARCHITECTURES = ("Glm4MoeForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config, partial_rotary=0.5)
    norm = fields.norm(fields.head_dim) if flag(config, "use_qk_norm") else None
    attention = fields.attention(qkv_bias=flag(config, "attention_bias"), q_norm=norm, k_norm=norm)
    count, inner = positive_int(config, "n_routed_experts", 128), positive_int(config, "moe_intermediate_size", 1408)
    chosen = experts_per_token(config, count, default=8)
    groups, kept_groups = expert_groups(config, count, chosen)
    experts = Experts(
        hidden_size=fields.hidden_size,
        intermediate_size=inner,
        num_experts=count,
        num_chosen=chosen,
        score="sigmoid",
        normalize=config.get("norm_topk_prob") is None or flag(config, "norm_topk_prob"),
        scale=positive_number(config, "routed_scaling_factor", 1.0),
        groups=groups,
        kept_groups=kept_groups,
        choice_bias=True,
        float32_router=True,
        shared=fields.feed_forward(intermediate_size=inner * positive_int(config, "n_shared_experts", 1)),
    )
    dense = config.get("first_k_dense_replace", 1)
    first = 0 if dense == 0 else positive_int(config, "first_k_dense_replace", 1)
    # Layers past the last predict tokens further ahead. They are not part of this forward.
    config.get("num_nextn_predict_layers")
    return fields.decoder(
        fields.layer(attention, fields.feed_forward() if index < first else experts)
        for index in range(fields.num_layers)
    )
