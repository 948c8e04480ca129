"""GLM-4 of 2024 and 2025 (arXiv 2406.12793), GLM-4.5 and 4.6 (arXiv 2508.06471), and GLM-4.7-Flash."""

from functools import partial

from onward.errors import ConfigError
from onward.models.blocks import Decoder, LayerNames
from onward.models.config import check_layer_types, common_fields, only
from onward.models.families.deepseek import deepseek_experts, dense_then_sparse, latent_attention
from onward.models.family_fields import layers_ahead, num_dense_layers
from onward.models.fields import Config, FieldOverlay, flag

_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True}
_GLM4_NAMES = LayerNames(mixer_post_norm="post_self_attn_layernorm", feed_forward_post_norm="post_mlp_layernorm")
_LATENT = {
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
}  # fmt: skip


def _read_glm(config: Config, *, has_post_norms: bool = False) -> Decoder:
    """Half of each head is rotated, in interleaved pairs; gate and up in one matrix."""
    config = FieldOverlay(config, _DEFAULTS)
    fields = common_fields(config, partial=0.5, interleaved=True)
    norm = fields.norm()
    after = {"mixer_post_norm": norm, "feed_forward_post_norm": norm, "names": _GLM4_NAMES} if has_post_norms else {}
    attention = fields.attention(qkv_bias=flag(config, "attention_bias"))
    return fields.decoder([fields.layer(attention, fields.feed_forward(fused=True), **after)] * fields.num_layers)


def _read_glm4_moe(config: Config) -> Decoder:
    """Half of each head is rotated; experts with DeepSeek-V3's router (arXiv 2412.19437)."""
    fields = common_fields(config, partial=0.5, default_eps=1e-5)
    norm = fields.norm(fields.head_dim) if flag(config, "use_qk_norm") else None
    attention = fields.attention(qkv_bias=flag(config, "attention_bias"), q_norm=norm, k_norm=norm)
    experts = deepseek_experts(config, fields, count=128, inner=1408, scale=1.0)
    layers = dense_then_sparse(config, fields, attention, experts, 1)
    return fields.decoder(layers, **layers_ahead(config, fields.num_layers))


def _read_glm4_moe_lite(config: Config) -> Decoder:
    """GLM-4.5's experts with DeepSeek's latent attention (arXiv 2405.04434)."""
    only(config, topk_method="noaux_tc")
    fields, attention = latent_attention(config, _LATENT, default_eps=1e-5)
    experts = deepseek_experts(config, fields, count=64, inner=1536, scale=1.8, chosen=4)
    types = _types(config, fields.num_layers)
    layers = (fields.layer(attention, experts if kind == "sparse" else fields.feed_forward()) for kind in types)
    return fields.decoder(layers, **layers_ahead(config, fields.num_layers))


def _types(config: Config, num_layers: int) -> list[str]:
    """The type of each layer, "dense" or "sparse" (with experts); by default all but the first are sparse."""
    first, types = num_dense_layers(config, 1), config.get("mlp_layer_types")
    by_number = ["dense" if index < first else "sparse" for index in range(num_layers)]
    if types is None:
        return by_number
    check_layer_types(types, num_layers, ("dense", "sparse"), name="mlp_layer_types")
    if config.get("first_k_dense_replace") is not None and types != by_number:
        raise ConfigError(f"config.json: mlp_layer_types {types} contradicts first_k_dense_replace {first}: keep one")
    return list(types)


ARCHITECTURES = {
    "GlmForCausalLM": _read_glm,
    "Glm4ForCausalLM": partial(_read_glm, has_post_norms=True),
    "Glm4MoeForCausalLM": _read_glm4_moe,
    "Glm4MoeLiteForCausalLM": _read_glm4_moe_lite,
}
