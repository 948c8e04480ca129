"""The config.json of a model that goes to GGUF, with all fields of its family."""

from collections.abc import Callable, Mapping
from typing import Any

from onward.checkpoint.gguf.exporting_fields import OF_ROPE, common, experts_of, first, mixers
from onward.checkpoint.gguf.exporting_rope import rope_of
from onward.models.blocks import Decoder, Experts, FeedForward, GatedConv, GatedDelta, LatentAttention

Completed = Callable[[Mapping[str, Any], Decoder], dict[str, Any]]


def as_it_is(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    return dict(config)


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a checkpoint that reads images, too, the config.json of its text part; without the architecture's name."""
    tie = config.get("tie_word_embeddings")
    return dict(config["text_config"]) | ({} if tie is None else {"tie_word_embeddings": tie})


def untied(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Of a family of which llama.cpp opens no file without a head (`exporting_restated.untied`)."""
    return {**config, "tie_word_embeddings": False}


def delta(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Qwen3.5, dense."""
    block = first(mixers(decoder), GatedDelta)
    types = ["linear_attention" if isinstance(mixer, GatedDelta) else "full_attention" for mixer in mixers(decoder)]
    return {
        **common(config, decoder),
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_conv_kernel_dim": block.taps,
        "linear_key_head_dim": block.key_dim,
        "linear_value_head_dim": block.value_dim,
        "linear_num_key_heads": block.key_heads,
        "linear_num_value_heads": block.value_heads,
        "layer_types": types,
    }


def delta_experts(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Qwen3.5 with experts, and Qwen3-Next as such."""
    experts = experts_of(decoder)
    assert experts.shared is not None, "this family has a block of all tokens"
    return {
        **delta(config, decoder),
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.intermediate_size,
        "shared_expert_intermediate_size": experts.shared.intermediate_size,
    }


def short_convolutions(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """LFM2. The width of its feed-forward blocks is the one that follows from the fields of how it is adjusted."""
    fields = {name: value for name, value in common(config, decoder).items() if name != "block_ff_dim"}
    return {
        **fields,
        "norm_eps": decoder.norm.eps,
        "intermediate_size": first([layer.feed_forward for layer in decoder.layers], FeedForward).intermediate_size,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": next((mixer.taps for mixer in mixers(decoder) if isinstance(mixer, GatedConv)), 3),
        "layer_types": ["conv" if isinstance(mixer, GatedConv) else "full_attention" for mixer in mixers(decoder)],
    }


def glm_experts(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """GLM-4.5."""
    return {**common(config, decoder), **_with_a_shared_block(decoder)[1]}


def _with_a_shared_block(decoder: Decoder) -> tuple[Experts, dict[str, Any]]:
    """Experts of a family whose first layers may have none, and their fields."""
    dense = next((i for i, layer in enumerate(decoder.layers) if isinstance(layer.feed_forward, Experts)), 0)
    experts = experts_of(decoder, dense=dense)
    assert experts.shared is not None, "this family has a block of all tokens"
    return experts, {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.intermediate_size,
        "n_shared_experts": experts.shared.intermediate_size // experts.intermediate_size,
        "first_k_dense_replace": dense,
        "routed_scaling_factor": experts.scale,
        "norm_topk_prob": experts.normalize,
    }


def latents(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """DeepSeek-V2 and V3, and GLM-4.7-Flash as V3."""
    attention = first(mixers(decoder), LatentAttention)
    experts, of_experts = _with_a_shared_block(decoder)
    by_softmax = experts.score == "softmax"
    method = "noaux_tc" if not by_softmax else "greedy" if experts.groups == 1 else "group_limited_greedy"
    rope = {name: value for name, value in rope_of(config).items() if name != "partial_rotary_factor"}
    return {
        **{name: value for name, value in config.items() if name not in (*OF_ROPE, "mlp_layer_types")},
        "architectures": ["DeepseekV2ForCausalLM" if by_softmax else "DeepseekV3ForCausalLM"],
        "num_key_value_heads": attention.num_heads,
        "head_dim": attention.rotary_dim,
        "q_lora_rank": attention.query_rank,
        "kv_lora_rank": attention.latent_dim,
        "qk_nope_head_dim": attention.content_dim,
        "qk_rope_head_dim": attention.rotary_dim,
        "v_head_dim": attention.value_dim,
        "rms_norm_eps": decoder.norm.eps,
        "rope_parameters": rope | {"rope_theta": attention.rope.base},
        **of_experts,
        "n_group": experts.groups,
        "topk_group": experts.kept_groups,
        "topk_method": method,
    }
