"""What metadata of a GGUF file say in a way of their family's own: as fields of config.json, and back."""

from collections.abc import Mapping
from typing import Any

from onward.checkpoint.gguf.metadata import list_of, number, quotient
from onward.errors import ConfigError
from onward.models.config import MOST_LAYERS
from onward.models.fields import positive_int


def layer_types(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a window, where the file says it: for each, or by a number n, of which every n-th has none."""
    pattern, layers = metadata.get("attention.sliding_window_pattern"), config.get("num_hidden_layers")
    slides = list_of(pattern)
    if slides is None and isinstance(pattern, int) and isinstance(layers, int) and pattern >= 0:
        check_layers(layers)
        slides = [not pattern or (layer + 1) % pattern for layer in range(layers)]
    if slides is None:
        return {}
    # llama.cpp reads no more than there are layers.
    slides = slides[:layers] if isinstance(layers, int) else slides
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


def layer_windows(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The same of families whose files have no window where the model has none."""
    layers = config.get("num_hidden_layers")
    if config.get("sliding_window"):
        return layer_types(metadata, config)
    if not isinstance(layers, int):
        return {"sliding_window": None}
    return {"sliding_window": None, "layer_types": ["full_attention"] * check_layers(layers)}


def check_layers(layers: int) -> int:
    """As many layers, where a model may have them: a list of them takes no memory that a file makes up."""
    return positive_int({"num_hidden_layers": layers}, "num_hidden_layers", most=MOST_LAYERS)


def exaone4(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Where layers have windows, these alone turn. llama.cpp knows the model of 32B, whose window a file may leave
    unsaid."""
    of_32b = config.get("num_hidden_layers") == 64 and "sliding_window" not in config
    config = {**config, "sliding_window": 4096} if of_32b else config
    base = number(metadata, "rope.freq_base_swa", config["rope_parameters"]["rope_theta"])
    if not config.get("sliding_window"):
        return layer_windows(metadata, config)
    return {
        "sliding_window": config["sliding_window"],
        "rope_parameters": config["rope_parameters"] | {"rope_theta": base},
        **layer_windows(metadata, config),
    }


def olmo3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    base = number(metadata, "rope.freq_base_swa", rope["rope_theta"])
    ropes = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": base}}
    return {**layer_types(metadata, config), "rope_parameters": ropes}


def phi3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A window of 0 is none."""
    return {"sliding_window": config.get("sliding_window") or None}


def granite(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The scale of scores: where no key says it, that of a head, as in llama.cpp; config.json means 1."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_dim = config.get("head_dim", quotient(hidden, heads))
    scale = config.get("attention_multiplier") or (isinstance(head_dim, int) and head_dim > 0 and head_dim**-0.5)
    return {"attention_multiplier": scale} if scale else {}


def without_ahead(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that look further ahead come behind the others, and are counted with them."""
    layers, ahead = number(metadata, "block_count"), number(metadata, "nextn_predict_layers", 0)
    if not isinstance(ahead, int):
        raise ConfigError(f"nextn_predict_layers must be a whole number; got {ahead}")
    if isinstance(layers, int):
        layers -= ahead
    return {"num_hidden_layers": layers, "num_nextn_predict_layers": ahead}


def gpt_oss(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The ramp of the family's YaRN begins and ends between pairs, which no key says."""
    rope = config["rope_parameters"]
    if "sliding_window" not in config:
        raise ConfigError("attention.sliding_window is missing")
    return {
        **layer_types(metadata, config),
        "intermediate_size": config.get("intermediate_size", number(metadata, "feed_forward_length")),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }
