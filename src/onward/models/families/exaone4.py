"""EXAONE 4 (arXiv 2507.11407): norms after the blocks and of heads; layers that see all positions turn nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Decoder, DecoderLayer, LayerNames
from onward.models.config import common_fields, every_nth_full, layer_types, layer_windows, sliding_window
from onward.models.fields import Overlaid, positive_int

ARCHITECTURES = ("Exaone4ForCausalLM",)

_DEFAULTS = {"rms_norm_eps": 1e-5}
_NAMES = LayerNames(
    mixer_post_norm="post_attention_layernorm",
    feed_forward_post_norm="post_feedforward_layernorm",
)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(Overlaid(config, _DEFAULTS))
    norm, head_norm, feed_forward = fields.norm(), fields.norm(fields.head_dim), fields.feed_forward()
    attention = fields.attention(q_norm=head_norm, k_norm=head_norm)
    window = sliding_window(config)
    windows = layer_windows(layer_types(config, _pattern(config, fields.num_layers, window)), window)
    return fields.decoder(
        DecoderLayer(
            # A model without windows turns everywhere.
            replace(attention, window=own, rope=None if window is not None and own is None else fields.rope),
            feed_forward,
            mixer_post_norm=norm,
            feed_forward_post_norm=norm,
            names=_NAMES,
        )
        for own in windows
    )


def _pattern(config: Mapping[str, Any], num_layers: int, window: int | None) -> Sequence[str]:
    """The types of layers of a config without `layer_types`: every n-th layer sees all, or as letters say it, "LLLG".

    By letters the last layer sees all positions, wherever the pattern ends.
    """
    pattern = config.get("sliding_window_pattern", 4)
    if window is None or pattern is None:
        return ["full_attention"] * num_layers
    if not isinstance(pattern, str):
        return every_nth_full(positive_int(config, "sliding_window_pattern", 4), num_layers)
    if not pattern or set(pattern) - {"L", "G"}:
        raise ConfigError(
            f"config.json: sliding_window_pattern must be a number, or letters L (window) and G (all); got {pattern!r}"
        )
    letters = (pattern * num_layers)[: num_layers - 1] + "G"
    return ["sliding_attention" if letter == "L" else "full_attention" for letter in letters]
