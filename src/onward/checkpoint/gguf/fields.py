"""The fields of config.json that a GGUF file's metadata say in a way of their family's own."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from onward.checkpoint.gguf.keys import DELTA
from onward.errors import ConfigError

# llama.cpp's number of softmax among the functions that choose experts.
_BY_SOFTMAX = 1


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


def _whole_numbers(key: str, value: Any) -> list[int] | None:
    """The numbers of an array, one for each layer; None for what is none."""
    values = _list(value)
    if values is not None and not all(isinstance(item, int | np.integer) for item in values):
        raise ConfigError(f"{key} must be whole numbers; got {values[:4]}")
    return None if values is None else [int(item) for item in values]


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


def gemma4(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The widths of heads are those of layers with a window, and beside them those of the others."""
    for end in ("", "_swa"):
        keys, values = (_number(metadata, f"attention.{name}_length{end}") for name in ("key", "value"))
        if values not in (None, keys):
            raise ConfigError(f"keys of {keys} and values of {values} numbers differ")
    types = layer_types(metadata, config)
    rope = config["rope_parameters"]
    if rope["rope_type"] != "proportional":
        raise ConfigError(
            "rope_freqs.weight must say which pairs of full layers turn: 1 those that do, 1e30 the others"
        )
    sliding = {"rope_type": "default", "rope_theta": _number(metadata, "rope.freq_base_swa", 10000.0)}
    turned, head_dim = _number(metadata, "rope.dimension_count_swa"), config.get("head_dim")
    if isinstance(turned, int) and isinstance(head_dim, int) and head_dim:
        sliding["partial_rotary_factor"] = turned / head_dim
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
    """Heads of keys: one number, or one for each layer, which its type decides."""
    heads = metadata.get("attention.head_count_kv")
    counts = _whole_numbers("attention.head_count_kv", heads)
    if counts is None:
        return {"num_key_value_heads": heads}
    of_type = dict(zip(types, counts, strict=False))
    if counts != [of_type.get(kind) for kind in types]:
        raise ConfigError(
            f"attention.head_count_kv must be one number for layers with a window and one for the others, as "
            f"attention.sliding_window_pattern says which are; got {counts}"
        )
    return {
        "num_key_value_heads": of_type.get("sliding_attention", counts[0] if counts else None),
        "num_global_key_value_heads": of_type.get("full_attention"),
    }


def _gemma4_widths(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that share keys may be twice as wide as the others."""
    width = metadata.get("feed_forward_length")
    widths = _whole_numbers("feed_forward_length", width)
    if not widths:
        return {"intermediate_size": width}
    shared = _number(metadata, "attention.shared_kv_layers", 0)
    own = len(widths) - (shared if isinstance(shared, int) else 0)
    wide = widths[-1] == 2 * widths[0]
    if len(widths) != config.get("num_hidden_layers") or widths != [
        widths[0] * (2 if wide and index >= own else 1) for index in range(len(widths))
    ]:
        raise ConfigError(
            f"feed_forward_length must be one number, or each layer's: twice it in the {shared} that share keys; got "
            f"{widths}"
        )
    return {"intermediate_size": widths[0], "use_double_wide_mlp": wide}


def keys_are_values(tensors: Collection[str]) -> bool:
    """Whether layers have keys and no values of their own."""
    counts = [sum(name.endswith(f".attn_{part}.weight") for name in tensors) for part in ("k", "v")]
    return counts[0] > counts[1]


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
    if attend is None:
        raise ConfigError("attention.head_count_kv must have a number for each layer")
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
        "layer_norm_epsilon": config.get("layer_norm_epsilon", _number(metadata, "attention.layer_norm_epsilon")),
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
    """The ramp of the family's YaRN begins and ends between pairs, which no key says."""
    rope = config["rope_parameters"]
    return {
        "intermediate_size": config.get("intermediate_size", _number(metadata, "feed_forward_length")),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }
