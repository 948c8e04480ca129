"""Metadata keys of GGUF files: the fields of config.json and generation_config.json that they set, and the other keys.

A key below "{architecture}." that a family does not read is refused if llama.cpp knows it and its value changes the
model. Keys that llama.cpp does not know are ignored, as in llama.cpp, and listed by `onward info`. `docs/gguf.md` has
the table, which a test compares with this one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onward.checkpoint.gguf.family import GgufFamily
from onward.checkpoint.gguf.reader import Keys, number
from onward.errors import ConfigError

# A field of config.json -> the key below "{architecture}.".
NUMBERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
# Keys for which 0 means off, as in llama.cpp.
ZERO_IS_OFF = {
    *("attn_logit_softcapping", "final_logit_softcapping", "expert_weights_scale"),
    *("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
}
# A field of generation_config.json -> the key below "general.sampling.".
SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
# A field of config.json's YaRN -> the key below "rope.scaling.".
YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
# LongRoPE's divisors are "rope_factors_short.weight" and "…_long.weight".
LENGTHS = "short", "long"
# llama.cpp's numbers of the routing functions for experts.
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
SOFTMAX_ROUTING: dict[str, object] = {"expert_gating_func": SOFTMAX, "expert_weights_norm": True}
# If false, Granite has no RoPE.
WITH_ROPE: dict[str, object] = {"rope.scaling.finetuned": True}
# llama.cpp's defaults, which differ from config.json's.
EXPERT_DEFAULTS: dict[str, object] = {"norm_topk_prob": False, "routed_scaling_factor": 1.0}
EXPERTS = {"num_experts_per_tok": "expert_used_count"}
DELTA = {
    "num_hidden_layers": None,
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
DELTA_EXPERTS = {
    **DELTA,
    **EXPERTS,
    "num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
MAMBA = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
GRANITE_EXPERTS = {
    **GRANITE,
    **EXPERTS,
    "num_local_experts": "expert_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}
GRANITE_HYBRID = {**GRANITE_EXPERTS, **MAMBA, "num_key_value_heads": None}
_ROUTED_EXPERTS = {
    **EXPERTS,
    "num_hidden_layers": None,
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
DEEPSEEK_EXPERTS = {**_ROUTED_EXPERTS, "first_k_dense_replace": "leading_dense_block_count"}
NEMOTRON_H = {
    **_ROUTED_EXPERTS,
    **dict.fromkeys(("intermediate_size", "num_key_value_heads", "rms_norm_eps")),
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "conv_kernel": "ssm.conv_kernel",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "mamba_num_heads": "ssm.time_step_rank",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_latent_size": "moe_latent_size",
}
GEMMA4 = {
    "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "attention.sliding_window",
    "head_dim": "attention.key_length_swa",
    "global_head_dim": "attention.key_length",
    "intermediate_size": None,
    "num_key_value_heads": None,
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
WINDOW = {"sliding_window": "attention.sliding_window"}


# All keys below "{arch}." in llama.cpp (llama-arch.cpp) and its package `gguf` (gguf.constants).
_NAMES = """
activation.situ_beta activation.situ_linear_beta activation_sparsity_scale adapters.count adapters.lora_rank
adapters.router_gain adapters.token_ids_activate adapters.token_ids_substitute altup.active_idx altup.num_inputs
attention.causal attention.clamp_kqv attention.compress_ratios attention.compress_rope_freq_base
attention.decay_lora_rank attention.gate_lora_rank attention.group_norm_epsilon attention.group_norm_groups
attention.head_count attention.head_count_kv attention.iclr_lora_rank attention.indexer.block_size
attention.indexer.head_count attention.indexer.key_length attention.indexer.kpool attention.indexer.kpool_select_tail
attention.indexer.local_blocks attention.indexer.top_k attention.indexer.types attention.key_length
attention.key_length_mla attention.key_length_mla_swa attention.key_length_swa attention.kv_lora_rank
attention.kv_lora_rank_swa attention.layer_norm_epsilon attention.layer_norm_rms_epsilon attention.max_alibi_bias
attention.output_group_count attention.output_lora_rank attention.output_scale attention.q_lora_rank
attention.recurrent_layers attention.relative_buckets_count attention.rope_pattern attention.scale
attention.shared_kv_layers attention.sliding_window attention.sliding_window_pattern attention.temperature_length
attention.temperature_scale attention.value_length attention.value_length_mla attention.value_length_mla_swa
attention.value_length_swa attention.value_residual_mix_lora_rank attention.value_scale attn_logit_softcapping
attn_res.block_size block_count block_size classifier.output_labels classifier.pooling_type context_length
conv_group_size conv_kernel_size convnext.block_count convnext.embedding_length decoder_block_count
decoder_start_token_id deepstack_mapping dense_2_feat_in dense_2_feat_out dense_3_feat_in dense_3_feat_out
embedding_length embedding_length_out embedding_length_per_layer_input embedding_scale expert_chunk_feed_forward_length
expert_count expert_feed_forward_length expert_gating_func expert_group_count expert_group_scale expert_group_used_count
expert_latent_length expert_shared_count expert_shared_feed_forward_length expert_used_count expert_weights_norm
expert_weights_scale experts_per_group features_length feed_forward_length final_logit_softcapping
full_attention_interval hash_layer_count hidden_activation hrm.h_cycles hrm.l_cycles hrm.layers_per_stack hrm.prefix_lm
hyper_connection.count hyper_connection.epsilon hyper_connection.low_rank hyper_connection.magnitude
hyper_connection.sinkhorn_iterations interleave_moe_layer_step kda.gate_lower_bound kda.head_dim kda.safe_gate
leading_dense_block_count logit_scale moe_every_n_layers moe_latent_size n_deepstack_layers nextn_predict_layers
norm_before_fc norm_before_residual num_loops ple.conv_kernel ple.eos_token_id ple.head_offsets ple.head_vocab_sizes
ple.heads_per_ngram ple.image_token_id ple.layer_multipliers ple.layers ple.ngram_size pooling_type posnet.block_count
posnet.embedding_length rescale_every_n_layers residual_scale rope.dimension_count rope.dimension_count_swa
rope.dimension_sections rope.freq_base rope.freq_base_swa rope.scale_linear rope.scaling.alpha rope.scaling.attn_factor
rope.scaling.factor rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.type
rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor
rope.scaling.yarn_log_multiplier router_logit_softcapping selector_rank selector_top_k shortconv.l_cache
skip_loop_final_norm ssm.conv_kernel ssm.dt_b_c_rms ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank
swiglu_clamp_exp swiglu_clamp_shexp swin_norm target_hidden_size target_layers tensor_data_layout time_decay_extra_dim
time_mix_extra_dim token_shift_count use_parallel_residual vocab_size wkv.head_size
"""
KNOWN = frozenset(_NAMES.split())

# Whether a value has no effect: (the value, or each one of an array, the file's keys, the fields of config.json).
_Test = Callable[[Any, Keys, Mapping[str, Any]], bool]


def _equals(other: str) -> _Test:
    """Whether the value equals that of another key, if the file has it."""
    return lambda value, keys, config: isinstance(value, int | float) and bool(value == number(keys, other, value))


def _is_off(value: Any, keys: Keys, config: Mapping[str, Any]) -> bool:
    return isinstance(value, int | float) and value == 0


def _is_one(value: Any, keys: Keys, config: Mapping[str, Any]) -> bool:
    return _is_off(value, keys, config) or (isinstance(value, int | float) and value == 1)


def _is_the_scale(value: Any, keys: Keys, config: Mapping[str, Any]) -> bool:
    """The float32 attention scale, which other families derive from the head width."""
    if config["architectures"] == ["Gemma4ForCausalLM"]:
        width: Any = 1
    else:
        width = config.get("query_pre_attn_scalar", config.get("head_dim"))
    own = width**-0.5 if isinstance(width, int) and width > 0 else None
    is_own = own is not None and isinstance(value, int | float) and abs(value - own) <= 2**-20 * own
    return is_own or _is_off(value, keys, config)


def _is_the_embedding_scale(value: Any, keys: Keys, config: Mapping[str, Any]) -> bool:
    """Gemma scales embeddings by the root of their width. Falcon-H1's scale is folded into the weights."""
    if config["architectures"] == ["FalconH1ForCausalLM"]:
        return True
    width, of_gemma = config.get("hidden_size"), "Gemma" in config["architectures"][0]
    if of_gemma and isinstance(width, int) and isinstance(value, int | float) and width > 0:
        return value == 0 or abs(value - width**0.5) <= 2**-20 * width**0.5
    return _is_one(value, keys, config)


# Shapes, which the tensors determine; keys for images, embedding models and classifiers; and keys without a reader.
_UNREAD = """
vocab_size attention.head_count_kv tensor_data_layout pooling_type classifier.output_labels classifier.pooling_type
rope.dimension_sections n_deepstack_layers attention.layer_norm_epsilon attention.group_norm_epsilon
attention.group_norm_groups deepstack_mapping expert_feed_forward_length expert_shared_feed_forward_length
attention.sliding_window_pattern attention.q_lora_rank expert_group_used_count rope.scaling.finetuned
decoder_start_token_id
"""
UNREAD = frozenset(_UNREAD.split())
_FACTORS = """
residual_scale logit_scale attention.output_scale attention.value_scale expert_weights_scale expert_group_count
expert_group_scale moe_every_n_layers interleave_moe_layer_step attention.rope_pattern
"""
# For keys that llama.cpp knows: whether a value has no effect in a family that does not read the key. All others must
# be off: 0, false or empty.
HARMLESS: dict[str, _Test] = {
    **dict.fromkeys(UNREAD, lambda value, keys, config: True),
    "attention.causal": lambda value, keys, config: value is True,
    "attention.sliding_window": lambda value, keys, config: (
        _is_off(value, keys, config)
        or (isinstance(value, int) and isinstance(most := keys.get("context_length"), int) and value >= most)
    ),
    "attention.scale": _is_the_scale,
    "embedding_scale": _is_the_embedding_scale,
    "hidden_activation": lambda value, keys, config: (
        isinstance(value, str)
        and value in (own := config.get("hidden_activation", config["hidden_act"]), own.partition("_")[0])
    ),
    # One shared expert, in families that have it.
    "expert_shared_count": lambda value, keys, config: (
        _is_off(value, keys, config) or (value == 1 and "expert_shared_feed_forward_length" in keys)
    ),
    **dict.fromkeys(_FACTORS.split(), _is_one),
    **dict.fromkeys(
        (f"rope.scaling.yarn_{key}" for key in ("attn_factor", "beta_fast", "beta_slow", "log_multiplier")),
        lambda value, keys, config: str(keys.get("rope.scaling.type")) != "yarn" or _is_off(value, keys, config),
    ),
    "embedding_length_out": _equals("embedding_length"),
    "attention.key_length_swa": _equals("attention.key_length"),
    "attention.value_length_swa": _equals("attention.value_length"),
    "rope.dimension_count_swa": _equals("rope.dimension_count"),
    "rope.freq_base_swa": _equals("rope.freq_base"),
}


def check_unread(keys: Keys, family: GgufFamily, config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a key that was not read describes another model than `config`."""
    for key, value in keys.unread.items():
        values = value.tolist() if isinstance(value, np.ndarray) else value if isinstance(value, list) else [value]
        if key in family.fixed:
            expected = family.fixed[key]
            # 0 selects the family's own function in llama.cpp.
            allowed = (expected, 0) if key == "expert_gating_func" else (expected,)
            if any(type(each) is not type(expected) or each not in allowed for each in values):
                raise ConfigError(f"{key} is {_short(value)}, and only {expected} is supported in this family")
        elif key in KNOWN and not all(HARMLESS.get(key, _is_off)(each, keys, config) for each in values):
            raise ConfigError(f"{key} is {_short(value)}, which is not supported in this family")


def unknown_keys(keys: Keys) -> list[str]:
    """Keys that are ignored because llama.cpp does not know them."""
    return sorted(key for key in keys.unread if key not in KNOWN)


def _short(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 80 else f"{text[:80]}…"
