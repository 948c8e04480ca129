"""gpt-oss (arXiv 2508.10925): attention sinks, a window in every other layer, experts with a clamped SwiGLU.

Checkpoints have all experts of a layer in one MXFP4 tensor (`onward.checkpoint.stored_names`).
"""

from dataclasses import replace

from onward.errors import ConfigError
from onward.models.blocks import Decoder, ExpertNames
from onward.models.config import (
    attention_biases,
    common_fields,
    every_nth_full,
    ignore,
    layer_windows,
    sliding_window,
)
from onward.models.family_fields import routed_experts
from onward.models.fields import Config, FieldOverlay, positive_int, positive_number

_DEFAULTS = {"head_dim": 64, "attention_bias": True, "rms_norm_eps": 1e-5}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def _read_gpt_oss(config: Config) -> Decoder:
    scaled = config.get("rope_parameters") is not None or config.get("rope_scaling") is not None
    config = FieldOverlay(config, _DEFAULTS if scaled else _DEFAULTS | {"rope_scaling": _ROPE})
    # OpenAI's files have this field under two names.
    other, chosen = config.get("experts_per_token"), config.get("num_experts_per_tok")
    if other not in (None, chosen):
        raise ConfigError(f"config.json: experts_per_token is {other!r} and num_experts_per_tok {chosen!r}: keep one")
    ignore(config, "initial_context_length")  # the trained context, which the RoPE object has too
    fields = common_fields(config, base=150_000.0)
    norm = fields.norm(after_cast=False)
    attention = fields.attention(**attention_biases(config), sinks=True)
    experts = routed_experts(
        config, fields, positive_int(config, "num_local_experts", 128), 4, score="softmax_of_chosen",
        activation="clamped_swiglu", alpha=positive_number(config, "swiglu_alpha", 1.702),
        limit=positive_number(config, "swiglu_limit", 7.0), router_bias=True, bias=True,
        names=ExpertNames(router="router"),
    )  # fmt: skip
    windows = layer_windows(config, every_nth_full(2, fields.num_layers), sliding_window(config, default=128))
    layers = (
        fields.layer(replace(attention, window=own), experts, mixer_norm=norm, feed_forward_norm=norm)
        for own in windows
    )
    return fields.decoder(layers, norm=norm)


ARCHITECTURES = {"GptOssForCausalLM": _read_gpt_oss}
