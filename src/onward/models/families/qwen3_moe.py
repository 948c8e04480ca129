"""Qwen3's mixtures of experts (arXiv 2505.09388): Qwen3's attention, and experts in all layers or some."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder, Experts
from onward.models.config import common_fields, sliding_window
from onward.models.expert_fields import experts_per_token, layers_with_experts, qwen_expert_count
from onward.models.fields import flag, positive_int

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config)
    bias = flag(config, "attention_bias")
    norm = fields.norm(fields.head_dim)
    window = sliding_window(config) if flag(config, "use_sliding_window") else None
    attention = fields.attention(qkv_bias=bias, o_bias=bias, q_norm=norm, k_norm=norm, window=window)
    count = qwen_expert_count(config, 128)
    experts = Experts(
        hidden_size=fields.hidden_size,
        intermediate_size=positive_int(config, "moe_intermediate_size", 768),
        num_experts=count,
        num_chosen=experts_per_token(config, count, default=8),
        normalize=flag(config, "norm_topk_prob"),
    )
    return fields.decoder(
        fields.layer(attention, experts if sparse else fields.feed_forward())
        for sparse in layers_with_experts(config, fields.num_layers)
    )
