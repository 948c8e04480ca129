"""The fields of config.json that a GGUF file's metadata say: by a key each, and what some say in a way of their own."""

from collections.abc import Mapping
from typing import Any

import numpy as np

# llama.cpp's number of softmax among the functions that choose experts.
_BY_SOFTMAX = 1

# A field of config.json -> the key behind "{architecture}.".
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
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
DEEPSEEK_EXPERTS = EXPERTS | {
    "num_hidden_layers": None,
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
WINDOW = {"sliding_window": "attention.sliding_window"}


def _number(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A number of the metadata; the default where it is none."""
    value = metadata.get(key, default)
    return value if isinstance(value, int | float) else default


def _list(value: Any) -> list[Any] | None:
    """The values of an array; None for what is none."""
    return list(value) if isinstance(value, np.ndarray | list) else None


def layer_types(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a window, where the file says it for each."""
    slides = _list(metadata.get("attention.sliding_window_pattern"))
    if slides is None:
        return {}
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


def gemma_scale(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The scale of scores, which no key has: that of a head but in the models of 27B, whose width makes it."""
    of_27b = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}
    hidden, heads, layers = (config.get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if layers in of_27b.values() and isinstance(hidden, int) and isinstance(heads, int) and heads:
        return {"query_pre_attn_scalar": hidden // heads}
    return {"query_pre_attn_scalar": config.get("head_dim")}


def gemma3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": _number(metadata, "rope.freq_base_swa", 10000.0)}
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": sliding}
    return {**gemma_scale(metadata, config), "rope_parameters": ropes}


def olmo3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    ropes = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": rope["rope_theta"]}}
    return {**layer_types(metadata, config), "rope_parameters": ropes}


def phi3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A window of 0 is none."""
    return {"sliding_window": config.get("sliding_window") or None}


def lfm2(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without heads of keys are convolutions."""
    heads = metadata.get("attention.head_count_kv")
    counts = _list(heads)
    if counts is not None:
        heads = max((int(count) for count in counts if isinstance(count, np.integer)), default=None)
    return {
        "num_key_value_heads": heads,
        "layer_types": None if counts is None else ["full_attention" if count else "conv" for count in counts],
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def without_ahead(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that look further ahead come behind the others, and are counted with them."""
    layers, ahead = _number(metadata, "block_count"), _number(metadata, "nextn_predict_layers", 0)
    if isinstance(layers, int) and isinstance(ahead, int):
        layers -= ahead
    return {"num_hidden_layers": layers, "num_nextn_predict_layers": ahead}


def deepseek(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """V2 where experts are chosen by softmax, else V3, which GLM-4.7-Flash and Kimi K2 are too. The widths of heads are
    those before the keys and values are computed of the latent."""
    rotary = _number(metadata, "rope.dimension_count")
    keys = _number(metadata, "attention.key_length_mla", _number(metadata, "attention.key_length"))
    content = keys - rotary if isinstance(keys, int) and isinstance(rotary, int) else None
    rope = {name: value for name, value in config["rope_parameters"].items() if name != "partial_rotary_factor"}
    multiplier = _number(metadata, "rope.scaling.yarn_log_multiplier")
    if isinstance(multiplier, float):
        rope |= {"mscale": round(10 * multiplier, 6), "mscale_all_dim": round(10 * multiplier, 6)}
    by_softmax = _number(metadata, "expert_gating_func", _BY_SOFTMAX) == _BY_SOFTMAX
    groups = config.get("n_group", 1)
    of_v2 = {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"} if by_softmax else {}
    return {
        **without_ahead(metadata, config),
        "architectures": ["DeepseekV2ForCausalLM" if by_softmax else "DeepseekV3ForCausalLM"],
        "num_key_value_heads": config.get("num_attention_heads"),
        "q_lora_rank": config.get("q_lora_rank"),
        "qk_nope_head_dim": content,
        "v_head_dim": _number(metadata, "attention.value_length_mla", _number(metadata, "attention.value_length")),
        "n_group": groups,
        "topk_group": config.get("topk_group", 1),
        "rope_parameters": rope,
        **of_v2,
    }


def qwen35(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    heads, features = _number(metadata, "ssm.time_step_rank"), _number(metadata, "ssm.inner_size")
    recurs = _list(metadata.get("attention.recurrent_layers"))
    return {
        **{name: config.get(name, 0) for name in DELTA},  # 0 is refused where it is read: files have all of these
        **without_ahead(metadata, config),
        "num_nextn_predict_layers": None,
        "linear_value_head_dim": features // heads
        if isinstance(features, int) and isinstance(heads, int) and heads
        else 0,
        "full_attention_interval": _number(metadata, "full_attention_interval", 4),
        "layer_types": recurs and ["linear_attention" if each else "full_attention" for each in recurs],
    }


def gpt_oss(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": _number(metadata, "expert_feed_forward_length", config.get("intermediate_size")),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }
