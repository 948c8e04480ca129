"""The fields of config.json that a GGUF file's metadata say: by a key each, and what some say in a way of their own."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from onward.errors import ConfigError

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
DEEPSEEK_EXPERTS = EXPERTS | {
    "num_hidden_layers": None,
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
NEMOTRON_H = {
    **EXPERTS,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_key_value_heads": None,
    "rms_norm_eps": None,
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "conv_kernel": "ssm.conv_kernel",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "mamba_num_heads": "ssm.time_step_rank",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_latent_size": "moe_latent_size",
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


def _each_layer(metadata: Mapping[str, Any], key: str) -> tuple[Any, list[bool] | None]:
    """The number of all layers that have one (0 says that a layer has none), and which have it. None: the metadata has
    one for all.

    Raises:
        ConfigError: two layers have different ones.
    """
    value = metadata.get(key)
    counts = _list(value)
    if counts is None:
        return value, None
    numbers = {int(count) for count in counts if isinstance(count, int | np.integer) and count}
    if len(numbers) > 1:
        raise ConfigError(f"{key} differs from layer to layer ({sorted(numbers)[:4]}), which is not supported")
    return max(numbers, default=None), [bool(count) for count in counts]


def _quotient(number: Any, divisor: Any) -> int:
    """Of two whole numbers; 0, which no width may be, where they are none."""
    return number // divisor if isinstance(number, int) and isinstance(divisor, int) and divisor else 0


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
    heads, attend = _each_layer(metadata, "attention.head_count_kv")
    return {
        "num_key_value_heads": heads,
        "layer_types": attend and ["full_attention" if each else "conv" for each in attend],
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def granite_hybrid(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without heads of keys are Mamba2's. A dense model has the block of all tokens alone."""
    heads, attend = _each_layer(metadata, "attention.head_count_kv")
    layers = config.get("num_hidden_layers")
    attend = attend or [True] * (layers if isinstance(layers, int) else 0)
    inner = _number(metadata, "ssm.inner_size")
    return {
        "num_key_value_heads": heads,
        "layer_types": ["attention" if each else "mamba" for each in attend],
        "mamba_d_head": _quotient(inner, config.get("mamba_n_heads")),
        "mamba_expand": _quotient(inner, config.get("hidden_size")),
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": config.get("shared_intermediate_size", config.get("intermediate_size")),
    }


def falcon_h1(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The factors of this family are in its weights."""
    return {"mamba_d_head": _quotient(config.get("mamba_d_ssm"), config.get("mamba_n_heads"))}


def nemotron_h(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A layer with heads of keys attends, one with a feed-forward width is such a block, the others are Mamba2's. The
    file has a number of features that turn, but none do."""
    layers = without_ahead(metadata, config)
    count = layers["num_hidden_layers"]
    heads, attend = _each_layer(metadata, "attention.head_count_kv")
    width, feed = _each_layer(metadata, "feed_forward_length")
    if not isinstance(count, int) or attend is None or feed is None or not count <= len(attend) == len(feed):
        raise ConfigError("attention.head_count_kv and feed_forward_length must have a number for each of the layers")
    block = "moe" if config.get("n_routed_experts") else "mlp"
    kinds = {(True, False): "attention", (False, True): block, (False, False): "mamba"}
    types = [kinds.get(pair) for pair in zip(attend[:count], feed[:count], strict=True)]
    if None in types:
        raise ConfigError(
            f"layer {types.index(None)} has attention.head_count_kv and feed_forward_length; layers of this family are "
            "one block each"
        )
    inner = _number(metadata, "ssm.inner_size")
    return {
        **layers,
        "layers_block_type": types,
        "num_key_value_heads": heads,
        "intermediate_size": width,
        "mamba_head_dim": _quotient(inner, config.get("mamba_num_heads")),
        "rope_parameters": None,
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
    recurs = _list(metadata.get("attention.recurrent_layers"))
    return {
        **{name: config.get(name, 0) for name in DELTA},  # 0 is refused where it is read: files have all of these
        **without_ahead(metadata, config),
        "num_nextn_predict_layers": None,
        "linear_value_head_dim": _quotient(
            _number(metadata, "ssm.inner_size"), _number(metadata, "ssm.time_step_rank")
        ),
        "full_attention_interval": _number(metadata, "full_attention_interval", 4),
        "layer_types": recurs and ["linear_attention" if each else "full_attention" for each in recurs],
    }


def gpt_oss(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": _number(metadata, "expert_feed_forward_length", config.get("intermediate_size")),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }
