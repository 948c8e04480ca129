"""What metadata of Gemma 2, 3 and 4 say in a way of their own (`onward.checkpoint.gguf.fields`)."""

from collections.abc import Collection, Mapping
from typing import Any

from onward.checkpoint.gguf.fields import layer_types, layer_windows
from onward.checkpoint.gguf.metadata import number, whole_numbers
from onward.errors import ConfigError


def _scale(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The scale of scores, which no key has: that of a head but in the models of 27B, whose width makes it."""
    of_27b = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}
    hidden, heads, layers = (config.get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if layers in of_27b.values() and isinstance(hidden, int) and isinstance(heads, int) and heads:
        return {"query_pre_attn_scalar": hidden // heads}
    return {"query_pre_attn_scalar": config.get("head_dim")}


def gemma2(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_scale(metadata, config), **layer_types(metadata, config)}


def gemma3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    _check_magnitude(metadata)
    sliding = {"rope_type": "default", "rope_theta": number(metadata, "rope.freq_base_swa", 10000.0)}
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": sliding}
    return {**_scale(metadata, config), **layer_windows(metadata, config), "rope_parameters": ropes}


def _check_magnitude(metadata: Mapping[str, Any]) -> None:
    """The key would count in layers with a window, too, and their RoPE has no field for it."""
    times = number(metadata, "rope.scaling.attn_factor", 1)
    if times != 1:
        raise ConfigError(f"rope.scaling.attn_factor is {times}, and only 1 is supported in this family")


def gemma4(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The widths of heads are those of layers with a window, and beside them those of the others."""
    for end in ("", "_swa"):
        keys, values = (number(metadata, f"attention.{name}_length{end}") for name in ("key", "value"))
        if values not in (None, keys):
            raise ConfigError(f"keys of {keys} and values of {values} numbers differ")
    _check_magnitude(metadata)
    types = layer_types(metadata, config)
    rope, width = config["rope_parameters"], config.get("global_head_dim")
    if number(metadata, "rope.dimension_count", width) != width:
        raise ConfigError("rope.dimension_count must be attention.key_length: rope_freqs says which pairs turn")
    if rope["rope_type"] != "proportional":
        raise ConfigError(
            "rope_freqs.weight must say which pairs of full layers turn: 1 those that do, 1e30 the others"
        )
    sliding = {"rope_type": "default", "rope_theta": number(metadata, "rope.freq_base_swa", 10000.0)}
    turned, head_dim = number(metadata, "rope.dimension_count_swa"), config.get("head_dim")
    if turned is not None and not isinstance(turned, int):
        raise ConfigError(f"rope.dimension_count_swa must be a whole number; got {turned}")
    if turned is not None and isinstance(head_dim, int) and head_dim:
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
    counts = whole_numbers("attention.head_count_kv", heads)
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
    widths = whole_numbers("feed_forward_length", width)
    if not widths:
        return {"intermediate_size": width}
    shared = number(metadata, "attention.shared_kv_layers", 0)
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
