"""Mistral (arXiv 2310.06825), Mixtral (arXiv 2401.04088), Ministral, and the text parts of multimodal models: Mistral
Small 3.1 and later, Ministral 3, Mistral Small 4."""

from dataclasses import replace
from functools import partial

from onward.errors import ConfigError
from onward.models.blocks import AttentionTemperature, Decoder, ExpertNames, LayerNames
from onward.models.config import common_fields, layer_windows, read_text_part, sliding_window
from onward.models.families.deepseek import deepseek_experts, dense_then_sparse, latent_attention
from onward.models.family_fields import routed_experts
from onward.models.fields import Config, FieldOverlay, json_object, positive_int, positive_number, words
from onward.models.rope import RotarySchedule, rope_fields

_IMAGES = words("""
    vision_config image_token_index image_token_id projector_hidden_act vision_feature_layer
    multimodal_projector_bias spatial_merge_size
""")
_LATENT = {
    "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
# The default RoPE fields of Mistral 4.
_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _read_mistral(config: Config) -> Decoder:
    """A sliding window in every layer, or in those of `layer_types`."""
    fields = common_fields(config)
    window = sliding_window(config)
    kind = "full_attention" if window is None else "sliding_attention"
    windows = layer_windows(config, [kind] * fields.num_layers, window)
    return fields.decoder(fields.windowed(fields.attention(), windows))


def _read_mixtral(config: Config) -> Decoder:
    """Mistral with experts in every layer."""
    fields = common_fields(config, default_eps=1e-5)
    count = positive_int(config, "num_local_experts", 8)
    names = ExpertNames(gate_proj="w1", up_proj="w3", down_proj="w2")
    experts = routed_experts(config, fields, count, 2, normalize=True, names=names)
    attention = fields.attention(window=sliding_window(config, None))
    layer = fields.layer(attention, experts, names=LayerNames(feed_forward="block_sparse_moe"))
    return fields.decoder([layer] * fields.num_layers)


def _read_ministral3(config: Config) -> Decoder:
    """YaRN, and queries scaled by position."""
    fields = common_fields(config, default_head_dim=128, default_eps=1e-5, also=("llama_4_scaling_beta",))
    attention = fields.attention(query_growth=_query_growth(config, fields.rope), window=sliding_window(config, None))
    return fields.decoder([fields.layer(attention, fields.feed_forward())] * fields.num_layers)


def _read_mistral4(config: Config) -> Decoder:
    """DeepSeek's latent attention (arXiv 2405.04434), Ministral 3's query scaling, experts chosen by softmax."""
    if not any(json_object(config, name) for name in ("rope_parameters", "rope_scaling")):
        config = FieldOverlay({"rope_parameters": _ROPE}, config)
    fields, attention = latent_attention(config, _LATENT, also=("llama_4_scaling_beta",))
    attention = replace(attention, query_growth=_query_growth(config, fields.rope))
    experts = deepseek_experts(
        config, fields, count=128, inner=2048, scale=1.0, chosen=4,
        score="softmax", choice_bias=False, float32_router=False,
    )  # fmt: skip
    return fields.decoder(dense_then_sparse(config, fields, attention, experts, 0))


def _query_growth(config: Config, rope: RotarySchedule) -> AttentionTemperature | None:
    """The query scaling of the RoPE object, if any."""
    name = "llama_4_scaling_beta"
    beta = rope_fields(config).get(name)
    if not beta:
        return None
    return AttentionTemperature(positive_number({name: beta}, name), rope.scaling.original_max_position)


def _read_text(config: Config) -> Decoder:
    kind = config.get("model_type", "mistral")
    if kind not in _TEXTS:
        raise ConfigError(
            f"config.json: model_type of text_config must be one of {', '.join(map(repr, _TEXTS))}; got {kind!r}"
        )
    return _TEXTS[kind](config)


# By the model_type of the text part.
_TEXTS = {"mistral": _read_mistral, "ministral3": _read_ministral3, "mistral4": _read_mistral4}
ARCHITECTURES = {
    "MinistralForCausalLM": _read_mistral,
    "Ministral3ForCausalLM": _read_ministral3,
    "MistralForCausalLM": _read_mistral,
    "Mistral3ForConditionalGeneration": partial(read_text_part, read=_read_text, other_fields=_IMAGES),
    "Mistral4ForCausalLM": _read_mistral4,
    "MixtralForCausalLM": _read_mixtral,
}
