"""What metadata of a GGUF file say in a way of their family's own: as fields of config.json, and back."""

from collections.abc import Mapping
from typing import Any

from onward.checkpoint.gguf.family import Said
from onward.checkpoint.gguf.metadata import list_of, number, quotient


def layer_types(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a window, where the file says it for each."""
    slides = list_of(metadata.get("attention.sliding_window_pattern"))
    if slides is None:
        return {}
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


def _olmo3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    ropes = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": rope["rope_theta"]}}
    return {**layer_types(metadata, config), "rope_parameters": ropes}


def _phi3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
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
    if isinstance(layers, int) and isinstance(ahead, int):
        layers -= ahead
    return {"num_hidden_layers": layers, "num_nextn_predict_layers": ahead}


def _gpt_oss(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The ramp of the family's YaRN begins and ends between pairs, which no key says."""
    rope = config["rope_parameters"]
    return {
        "intermediate_size": config.get("intermediate_size", number(metadata, "feed_forward_length")),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


LAYER_TYPES = Said(layer_types)
OLMO3 = Said(_olmo3)
PHI3 = Said(_phi3)
GRANITE = Said(granite)
WITHOUT_AHEAD = Said(without_ahead, lambda config: {"block_count": config["num_hidden_layers"]})
GPT_OSS = Said(_gpt_oss)
