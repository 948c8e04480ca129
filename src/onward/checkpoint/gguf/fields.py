"""Fields of config.json that are derived from a family's own metadata."""

from collections.abc import Collection, Mapping
from typing import Any

from onward.checkpoint.gguf.keys import DELTA, SIGMOID, SOFTMAX
from onward.checkpoint.gguf.reader import each_layer, list_of, number, quotient, whole_numbers
from onward.errors import ConfigError
from onward.models.config import MAX_LAYERS
from onward.models.fields import positive_int


def layer_types(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a window, if the file says so: for each layer, or as n, where every n-th layer has none."""
    pattern, layers = metadata.get("attention.sliding_window_pattern"), config.get("num_hidden_layers")
    slides = list_of(pattern)
    if slides is None and isinstance(pattern, int) and isinstance(layers, int) and pattern >= 0:
        check_layers(layers)
        slides = [not pattern or (layer + 1) % pattern for layer in range(layers)]
    if slides is None:
        return {}
    # llama.cpp ignores entries beyond the number of layers.
    slides = slides[:layers] if isinstance(layers, int) else slides
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


def layer_windows(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`layer_types` for families whose files have no window if the model has none."""
    layers = config.get("num_hidden_layers")
    if config.get("sliding_window"):
        return layer_types(metadata, config)
    if not isinstance(layers, int):
        return {"sliding_window": None}
    return {"sliding_window": None, "layer_types": ["full_attention"] * check_layers(layers)}


def check_layers(layers: int) -> int:
    """Validate a number of layers: a made-up count in a file must not allocate a long list."""
    return positive_int({"num_hidden_layers": layers}, "num_hidden_layers", most=MAX_LAYERS)


def exaone4(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Only layers with a window use RoPE. llama.cpp recognizes the 32B model, whose file may omit the window."""
    is_32b = config.get("num_hidden_layers") == 64 and "sliding_window" not in config
    config = {**config, "sliding_window": 4096} if is_32b else config
    base = number(metadata, "rope.freq_base_swa", config["rope_parameters"]["rope_theta"])
    if not config.get("sliding_window"):
        return layer_windows(metadata, config)
    rope = config["rope_parameters"] | {"rope_theta": base}
    return {"sliding_window": config["sliding_window"], "rope_parameters": rope, **layer_windows(metadata, config)}


def olmo3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    ropes = {"full_attention": rope, "sliding_attention": _sliding_rope(metadata, rope["rope_theta"])}
    return {**layer_types(metadata, config), "rope_parameters": ropes}


def _sliding_rope(metadata: Mapping[str, Any], base: Any = 10000.0) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": number(metadata, "rope.freq_base_swa", base)}


def phi3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": config.get("sliding_window") or None}


def granite(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The attention scale: by default the head's, as in llama.cpp, while config.json's default is 1."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_dim = config.get("head_dim", quotient(hidden, heads))
    scale = config.get("attention_multiplier") or (isinstance(head_dim, int) and head_dim > 0 and head_dim**-0.5)
    return {"attention_multiplier": scale} if scale else {}


def without_ahead(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Multi-token prediction layers come last, and count as layers."""
    layers, ahead = number(metadata, "block_count"), number(metadata, "nextn_predict_layers", 0)
    if not isinstance(ahead, int):
        raise ConfigError(f"nextn_predict_layers must be an integer; got {ahead}")
    if isinstance(layers, int):
        layers -= ahead
    return {"num_hidden_layers": layers, "num_nextn_predict_layers": ahead}


def gpt_oss(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The ramp of the family's YaRN is not rounded to whole pairs, for which there is no key."""
    rope = config["rope_parameters"]
    if "sliding_window" not in config:
        raise ConfigError("attention.sliding_window is missing")
    return {
        **layer_types(metadata, config),
        "intermediate_size": config.get("intermediate_size", number(metadata, "feed_forward_length")),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def deepseek(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """V2 if softmax selects the experts, else V3, which also covers GLM-4.7-Flash and Kimi K2."""
    rotary = number(metadata, "rope.dimension_count")
    keys = number(metadata, "attention.key_length_mla", number(metadata, "attention.key_length"))
    content = keys - rotary if isinstance(keys, int) and isinstance(rotary, int) else None
    rope = {name: value for name, value in config["rope_parameters"].items() if name != "partial_rotary_factor"}
    multiplier = number(metadata, "rope.scaling.yarn_log_multiplier")
    if isinstance(multiplier, int | float) and multiplier:
        rope |= {"mscale": round(10 * multiplier, 6), "mscale_all_dim": round(10 * multiplier, 6)}
    _check_magnitude(metadata)  # it scales attention scores too, which config.json cannot express
    by_softmax = _routing_function(metadata, config) == SOFTMAX
    groups = config.get("n_group", 1)
    of_v2 = {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"} if by_softmax else {}
    return {
        **without_ahead(metadata, config),
        "architectures": ["DeepseekV2ForCausalLM" if by_softmax else "DeepseekV3ForCausalLM"],
        "num_key_value_heads": config.get("num_attention_heads"),
        "q_lora_rank": config.get("q_lora_rank"),
        "qk_nope_head_dim": content,
        "v_head_dim": number(metadata, "attention.value_length_mla", number(metadata, "attention.value_length")),
        "n_group": groups,
        "topk_group": config.get("topk_group", 1),
        "rope_parameters": rope,
        **of_v2,
    }


def _routing_function(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Softmax by default, as in V2's files, except for GLM-4.7-Flash."""
    function = number(metadata, "expert_gating_func", 0)
    if function not in (0, SOFTMAX, SIGMOID):
        raise ConfigError(f"expert_gating_func is {function}; {SOFTMAX} (softmax) and {SIGMOID} (sigmoid) are known")
    is_glm = number(metadata, "block_count") in (47, 48) and config.get("vocab_size") == 154_880
    return function or (SIGMOID if is_glm else SOFTMAX)


def qwen35(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    value = metadata.get("attention.recurrent_layers")
    recurrent = list_of(value)
    if recurrent is None and value is not None:
        raise ConfigError(f"attention.recurrent_layers must have a value for each layer; got {value!r}")
    return {
        **{name: config.get(name, 0) for name in DELTA},  # required: 0 is refused when the config is read
        **without_ahead(metadata, config),
        "num_nextn_predict_layers": None,
        "linear_value_head_dim": quotient(number(metadata, "ssm.inner_size"), number(metadata, "ssm.time_step_rank")),
        "full_attention_interval": number(metadata, "full_attention_interval", 4),
        "layer_types": recurrent and ["linear_attention" if each else "full_attention" for each in recurrent],
    }


def lfm2(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without KV heads are convolutions."""
    heads, attend = each_layer(metadata, "attention.head_count_kv")
    return {
        "num_key_value_heads": heads,
        "layer_types": attend and ["full_attention" if each else "conv" for each in attend],
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def granite_hybrid(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without KV heads are Mamba2. A dense model has only the shared MLP."""
    heads, attend = each_layer(metadata, "attention.head_count_kv")
    if attend is None:
        raise ConfigError("attention.head_count_kv must have a number for each layer")
    inner, has_rope = number(metadata, "ssm.inner_size"), metadata.get("rope.scaling.finetuned", True)
    if not isinstance(has_rope, bool):
        raise ConfigError(f"rope.scaling.finetuned must be true or false; got {has_rope!r}")
    return {
        **granite(metadata, config),
        "num_key_value_heads": heads,
        "layer_types": ["attention" if each else "mamba" for each in attend],
        "mamba_d_head": quotient(inner, config.get("mamba_n_heads")),
        "mamba_expand": quotient(inner, config.get("hidden_size")),
        "position_embedding_type": "rope" if has_rope else "nope",
        "shared_intermediate_size": config.get("shared_intermediate_size", config.get("intermediate_size")),
    }


def falcon_h1(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The family's multipliers are folded into the weights."""
    return {"mamba_d_head": quotient(config.get("mamba_d_ssm"), config.get("mamba_n_heads"))}


def nemotron_h(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with KV heads are attention, layers with a feed-forward width are MLP or MoE, and others are Mamba2. The
    file has a number of rotated features, but there is no RoPE."""
    layers = without_ahead(metadata, config)
    count = layers["num_hidden_layers"]
    heads, attend = each_layer(metadata, "attention.head_count_kv")
    width, feed = each_layer(metadata, "feed_forward_length")
    if not isinstance(count, int) or attend is None or feed is None or not count <= len(attend) == len(feed):
        raise ConfigError("attention.head_count_kv and feed_forward_length must have a number for each layer")
    block = "moe" if config.get("n_routed_experts") else "mlp"
    kinds = {(True, False): "attention", (False, True): block, (False, False): "mamba"}
    types = [kinds.get(pair) for pair in zip(attend[:count], feed[:count], strict=True)]
    if None in types:
        raise ConfigError(f"layer {types.index(None)} has both attention.head_count_kv and feed_forward_length")
    inner = number(metadata, "ssm.inner_size")
    return {
        **layers,
        "layer_norm_epsilon": config.get("layer_norm_epsilon", number(metadata, "attention.layer_norm_epsilon")),
        "layers_block_type": types,
        "num_key_value_heads": heads,
        "intermediate_size": width,
        "mamba_head_dim": quotient(inner, config.get("mamba_num_heads")),
        "rope_parameters": None,
    }


def _scale(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The attention scale, which has no key: the head's, except for the 27B models, which use their width."""
    layers_of_27b = (46, 62)  # Gemma 2 and 3
    hidden, heads, layers = (config.get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if layers in layers_of_27b and isinstance(hidden, int) and isinstance(heads, int) and heads:
        return {"query_pre_attn_scalar": hidden // heads}
    return {"query_pre_attn_scalar": config.get("head_dim")}


def gemma2(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_scale(metadata, config), **layer_types(metadata, config)}


def gemma3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    _check_magnitude(metadata)
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": _sliding_rope(metadata)}
    return {**_scale(metadata, config), **layer_windows(metadata, config), "rope_parameters": ropes}


def _check_magnitude(metadata: Mapping[str, Any]) -> None:
    """The key would also apply to layers with a window, whose RoPE has no field for it."""
    times = number(metadata, "rope.scaling.attn_factor", 1)
    if times != 1:
        raise ConfigError(f"rope.scaling.attn_factor is {times}, and only 1 is supported in this family")


def gemma4(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Head widths have keys for layers with a window and for the others."""
    for end in ("", "_swa"):
        keys, values = (number(metadata, f"attention.{name}_length{end}") for name in ("key", "value"))
        if values not in (None, keys):
            raise ConfigError(f"key length {keys} and value length {values} must be equal")
    _check_magnitude(metadata)
    types = layer_types(metadata, config)
    rope, width = config["rope_parameters"], config.get("global_head_dim")
    if number(metadata, "rope.dimension_count", width) != width:
        raise ConfigError("rope.dimension_count must equal attention.key_length: rope_freqs has the rotated pairs")
    if rope["rope_type"] != "proportional":
        raise ConfigError("rope_freqs.weight must be 1 for the rotated pairs of full layers, and 1e30 for the others")
    sliding = _sliding_rope(metadata)
    rotated, head_dim = number(metadata, "rope.dimension_count_swa"), config.get("head_dim")
    if rotated is not None and not isinstance(rotated, int):
        raise ConfigError(f"rope.dimension_count_swa must be an integer; got {rotated}")
    if rotated is not None and isinstance(head_dim, int) and head_dim:
        sliding["partial_rotary_factor"] = rotated / head_dim
    has_experts = bool(config.get("num_experts"))
    return {
        **types,
        **_gemma4_heads(metadata, types.get("layer_types", [])),
        **_gemma4_widths(metadata, config),
        "rope_parameters": {"full_attention": rope, "sliding_attention": sliding},
        "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input", 0),
        "vocab_size_per_layer_input": config.get("vocab_size"),
        "enable_moe_block": has_experts,
        **({} if has_experts else dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"))),
    }


def _gemma4_heads(metadata: Mapping[str, Any], types: list[str]) -> dict[str, Any]:
    """KV heads: one number for all layers, or one per layer that depends on its type."""
    heads = metadata.get("attention.head_count_kv")
    counts = whole_numbers("attention.head_count_kv", heads)
    if counts is None:
        return {"num_key_value_heads": heads}
    by_type = dict(zip(types, counts, strict=False))
    if counts != [by_type.get(kind) for kind in types]:
        raise ConfigError(
            "attention.head_count_kv must be one number for layers with a window and one for the others "
            f"(attention.sliding_window_pattern); got {counts}"
        )
    return {
        "num_key_value_heads": by_type.get("sliding_attention", counts[0] if counts else None),
        "num_global_key_value_heads": by_type.get("full_attention"),
    }


def _gemma4_widths(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    width = metadata.get("feed_forward_length")
    widths = whole_numbers("feed_forward_length", width)
    if not widths:
        return {"intermediate_size": width}
    shared = number(metadata, "attention.shared_kv_layers", 0)
    own = len(widths) - (shared if isinstance(shared, int) else 0)
    wide = widths[-1] == 2 * widths[0]
    expected = [widths[0] * (2 if wide and index >= own else 1) for index in range(len(widths))]
    if len(widths) != config.get("num_hidden_layers") or widths != expected:
        raise ConfigError(
            f"feed_forward_length must be one number, or twice it in the last {shared} layers; got {widths}"
        )
    return {"intermediate_size": widths[0], "use_double_wide_mlp": wide}


def keys_are_values(tensors: Collection[str]) -> bool:
    counts = [sum(name.endswith(f".attn_{part}.weight") for name in tensors) for part in ("k", "v")]
    return counts[0] > counts[1]
