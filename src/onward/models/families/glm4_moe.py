"""GLM-4.5 and 4.6 (arXiv 2508.06471): half of each head turns; experts with DeepSeek-V3's router (arXiv 2412.19437)."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import common_fields
from onward.models.expert_fields import layers_ahead, num_dense_layers
from onward.models.families.deepseek_v3 import deepseek_experts
from onward.models.fields import flag

ARCHITECTURES = ("Glm4MoeForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config, partial_rotary=0.5, default_eps=1e-5)
    norm = fields.norm(fields.head_dim) if flag(config, "use_qk_norm") else None
    attention = fields.attention(qkv_bias=flag(config, "attention_bias"), q_norm=norm, k_norm=norm)
    experts = deepseek_experts(config, fields, count=128, inner=1408, scale=1.0)
    first = num_dense_layers(config, 1)
    return fields.decoder(
        (fields.layer(attention, fields.feed_forward() if i < first else experts) for i in range(fields.num_layers)),
        unread=layers_ahead(config, fields.num_layers),
    )
