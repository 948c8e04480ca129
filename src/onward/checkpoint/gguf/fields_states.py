"""What metadata of families with recurrent layers say in a way of their own (`onward.checkpoint.gguf.fields`)."""

from collections.abc import Mapping
from typing import Any

from onward.checkpoint.gguf.fields import granite, without_ahead
from onward.checkpoint.gguf.keys import DELTA
from onward.checkpoint.gguf.metadata import each_layer, list_of, number, quotient
from onward.errors import ConfigError


def qwen35(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    given = metadata.get("attention.recurrent_layers")
    recurs = list_of(given)
    if recurs is None and given is not None:
        raise ConfigError(f"attention.recurrent_layers must have a value for each layer; got {given!r}")
    return {
        **{name: config.get(name, 0) for name in DELTA},  # 0 is refused where it is read: files have all of these
        **without_ahead(metadata, config),
        "num_nextn_predict_layers": None,
        "linear_value_head_dim": quotient(number(metadata, "ssm.inner_size"), number(metadata, "ssm.time_step_rank")),
        "full_attention_interval": number(metadata, "full_attention_interval", 4),
        "layer_types": recurs and ["linear_attention" if each else "full_attention" for each in recurs],
    }


def lfm2(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without heads of keys are convolutions."""
    heads, attend = each_layer(metadata, "attention.head_count_kv")
    return {
        "num_key_value_heads": heads,
        "layer_types": attend and ["full_attention" if each else "conv" for each in attend],
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def granite_hybrid(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without heads of keys are Mamba2's. A dense model has the block of all tokens alone."""
    heads, attend = each_layer(metadata, "attention.head_count_kv")
    if attend is None:
        raise ConfigError("attention.head_count_kv must have a number for each layer")
    inner, turns = number(metadata, "ssm.inner_size"), metadata.get("rope.scaling.finetuned", True)
    if not isinstance(turns, bool):
        raise ConfigError(f"rope.scaling.finetuned must be true or false; got {turns!r}")
    return {
        **granite(metadata, config),
        "num_key_value_heads": heads,
        "layer_types": ["attention" if each else "mamba" for each in attend],
        "mamba_d_head": quotient(inner, config.get("mamba_n_heads")),
        "mamba_expand": quotient(inner, config.get("hidden_size")),
        "position_embedding_type": "rope" if turns else "nope",
        "shared_intermediate_size": config.get("shared_intermediate_size", config.get("intermediate_size")),
    }


def falcon_h1(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The factors of this family are in its weights."""
    return {"mamba_d_head": quotient(config.get("mamba_d_ssm"), config.get("mamba_n_heads"))}


def nemotron_h(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A layer with heads of keys attends, one with a feed-forward width is such a block, the others are Mamba2's. The
    file has a number of features that turn, but none do."""
    layers = without_ahead(metadata, config)
    count = layers["num_hidden_layers"]
    heads, attend = each_layer(metadata, "attention.head_count_kv")
    width, feed = each_layer(metadata, "feed_forward_length")
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
