"""OLMo 2 (arXiv 2501.00656), OLMo 3 (arXiv 2512.13961) and EXAONE 4 (arXiv 2507.11407): norms only after blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from onward.errors import ConfigError
from onward.models.blocks import Attention, Decoder, DecoderLayer, LayerNames, RMSNorm
from onward.models.config import (
    CommonFields,
    attention_biases,
    common_fields,
    every_nth_full,
    layer_windows,
    ropes_by_type,
    sliding_window,
)
from onward.models.fields import Config, FieldOverlay, positive_int
from onward.models.rope import rotary_schedule

_DEFAULTS = {"rms_norm_eps": 1e-5}
_BASE = 500_000.0  # of OLMo 3
_NAMES = LayerNames(mixer_post_norm="post_attention_layernorm", feed_forward_post_norm="post_feedforward_layernorm")


def _read_olmo2(config: Config) -> Decoder:
    fields = common_fields(FieldOverlay(config, _DEFAULTS))
    return _decoder(fields, [_olmo_attention(config, fields)] * fields.num_layers, fields.norm(after_cast=False))


def _read_olmo3(config: Config) -> Decoder:
    """OLMo 2 with a window in three of four layers, and scaled RoPE only in the others."""
    ropes = ropes_by_type(config)
    full = {"rope_parameters": ropes.get("full_attention", {})}
    fields = common_fields(FieldOverlay(full, config, _DEFAULTS), base=_BASE)
    # Without an object per layer type, rope_theta applies to all layers and rope_scaling only to the full ones.
    theta = {} if ropes else {"rope_theta": config.get("rope_theta")}
    sliding = theta | {"rope_parameters": ropes.get("sliding_attention")}
    local = rotary_schedule(sliding, fields.head_dim, fields.max_position_embeddings, base=_BASE)
    attention = _olmo_attention(config, fields)
    windows = layer_windows(config, every_nth_full(4, fields.num_layers), sliding_window(config))
    attentions = [replace(attention, window=own, rope=fields.rope if own is None else local) for own in windows]
    return _decoder(fields, attentions, fields.norm(after_cast=False))


def _olmo_attention(config: Config, fields: CommonFields) -> Attention:
    """Norms of whole queries and keys."""
    q_norm = fields.norm(fields.num_heads * fields.head_dim, after_cast=False)
    k_norm = fields.norm(fields.num_kv_heads * fields.head_dim, after_cast=False)
    return fields.attention(**attention_biases(config), q_norm=q_norm, k_norm=k_norm)


def _read_exaone4(config: Config) -> Decoder:
    """Norms of heads; no RoPE in layers with full attention."""
    fields = common_fields(FieldOverlay(config, _DEFAULTS))
    head_norm = fields.norm(fields.head_dim)
    attention = fields.attention(q_norm=head_norm, k_norm=head_norm)
    window = sliding_window(config)
    windows = layer_windows(config, _pattern(config, fields.num_layers, window), window)
    # A model without windows has RoPE in all layers.
    attentions = (
        replace(attention, window=own, rope=None if window is not None and own is None else fields.rope)
        for own in windows
    )
    return _decoder(fields, attentions, fields.norm())


def _pattern(config: Config, num_layers: int, window: int | None) -> Sequence[str]:
    """The default layer types: every n-th layer is full, or a pattern of letters such as "LLLG", whose last layer is
    always full."""
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


def _decoder(fields: CommonFields, attentions: Iterable[Attention], norm: RMSNorm) -> Decoder:
    block = fields.feed_forward()
    layers = (
        DecoderLayer(each, block, mixer_post_norm=norm, feed_forward_post_norm=norm, names=_NAMES)
        for each in attentions
    )
    return fields.decoder(layers, norm=norm)


ARCHITECTURES = {"Exaone4ForCausalLM": _read_exaone4, "Olmo2ForCausalLM": _read_olmo2, "Olmo3ForCausalLM": _read_olmo3}
