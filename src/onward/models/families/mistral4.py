"""Mistral Small 4: DeepSeek's latent attention (arXiv 2405.04434), Ministral's growing queries, experts by softmax."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onward.models.blocks import Decoder
from onward.models.expert_fields import num_dense_layers
from onward.models.families.deepseek_v3 import deepseek_experts, latent_attention
from onward.models.families.ministral import query_growth
from onward.models.fields import Overlaid, json_object

ARCHITECTURES = ("Mistral4ForCausalLM",)

_DEFAULTS = {
    "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
# Of a config without an object of RoPE fields.
_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def read_config(config: Mapping[str, Any]) -> Decoder:
    if not any(json_object(config, name) for name in ("rope_parameters", "rope_scaling")):
        config = Overlaid({"rope_parameters": _ROPE}, config)
    fields, attention = latent_attention(config, _DEFAULTS, rope_also=("llama_4_scaling_beta",))
    attention = replace(attention, query_growth=query_growth(config, fields.rope))
    experts = deepseek_experts(
        config, fields, count=128, inner=2048, scale=1.0, chosen=4,
        score="softmax", choice_bias=False, float32_router=False,
    )  # fmt: skip
    first = num_dense_layers(config, 0)
    return fields.decoder(
        fields.layer(attention, fields.feed_forward() if i < first else experts) for i in range(fields.num_layers)
    )
