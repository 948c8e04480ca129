"""GLM-4.7-Flash: GLM-4.5's experts (arXiv 2508.06471) with DeepSeek's latent attention (arXiv 2405.04434)."""

from collections.abc import Mapping
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Decoder
from onward.models.config import check_layer_types, only
from onward.models.expert_fields import layers_ahead, num_dense_layers
from onward.models.families.deepseek_v3 import deepseek_experts, latent_attention

ARCHITECTURES = ("Glm4MoeLiteForCausalLM",)

_DEFAULTS = {
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
}  # fmt: skip


def read_config(config: Mapping[str, Any]) -> Decoder:
    only(config, "topk_method", "noaux_tc")
    fields, attention = latent_attention(config, _DEFAULTS, default_eps=1e-5)
    experts = deepseek_experts(config, fields, count=64, inner=1536, scale=1.8, chosen=4)
    return fields.decoder(
        (
            fields.layer(attention, experts if kind == "sparse" else fields.feed_forward())
            for kind in _types(config, fields.num_layers)
        ),
        unread=layers_ahead(config, fields.num_layers),
    )


def _types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Which layers have experts: "sparse" ones; all but the first, unless the config says otherwise."""
    first, types = num_dense_layers(config, 1), config.get("mlp_layer_types")
    by_number = ["dense" if index < first else "sparse" for index in range(num_layers)]
    if types is None:
        return by_number
    check_layer_types(types, num_layers, ("dense", "sparse"), name="mlp_layer_types")
    if config.get("first_k_dense_replace") is not None and types != by_number:
        raise ConfigError(
            f"config.json: mlp_layer_types is {types}, and first_k_dense_replace {first} means another: keep one"
        )
    return list(types)
