"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783) and similar models: Seed-OSS, SmolLM3, and Phi-3, 3.5 and 4 (arXiv
2404.14219)."""

from dataclasses import replace

from onward.errors import ConfigError
from onward.models.blocks import Decoder
from onward.models.config import attention_biases, common_fields, layer_windows, sliding_window
from onward.models.fields import Config, FieldOverlay, flag, positive_int


def _read_llama(config: Config, o_bias: str = "attention_bias") -> Decoder:
    """o_bias: the field for the bias of attention's output."""
    fields = common_fields(config)
    attention = fields.attention(qkv_bias=flag(config, "attention_bias"), o_bias=flag(config, o_bias))
    layer = fields.layer(attention, fields.feed_forward(bias=flag(config, "mlp_bias")))
    return fields.decoder([layer] * fields.num_layers)


def _read_seed_oss(config: Config) -> Decoder:
    return _read_llama(FieldOverlay(config, {"head_dim": 128, "attention_bias": True}), "attention_out_bias")


def _read_phi3(config: Config) -> Decoder:
    """Fused projections; in Phi-4-mini heads are rotated in part."""
    fields = common_fields(config, partial=1.0, default_eps=1e-5)
    attention = fields.attention(window=sliding_window(config, None), fused=True)
    return fields.decoder([fields.layer(attention, fields.feed_forward(fused=True))] * fields.num_layers)


def _read_smollm3(config: Config) -> Decoder:
    """One layer in four has no RoPE (NoPE, arXiv 2305.19466)."""
    config = FieldOverlay(config, {"num_key_value_heads": 4, "tie_word_embeddings": True})
    fields = common_fields(config, base=2e6)
    attention = fields.attention(**attention_biases(config))
    feed_forward = fields.feed_forward(bias=flag(config, "mlp_bias"))
    rotates = _rotated_layers(config, fields.num_layers)
    return fields.decoder(
        fields.layer(replace(attention, rope=fields.rope if has_rope else None, window=window), feed_forward)
        for has_rope, window in zip(rotates, _windows(config, rotates), strict=True)
    )


def _rotated_layers(config: Config, num_layers: int) -> list[bool]:
    """Whether each layer has RoPE: `no_rope_layers` has a 1 for those that do."""
    flags, interval = config.get("no_rope_layers"), positive_int(config, "no_rope_layer_interval", 4)
    if flags is None:
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(flags, list) or len(flags) < num_layers or any(each not in (0, 1) for each in flags):
        got = f"a list of {len(flags)}" if isinstance(flags, list) else repr(flags)
        raise ConfigError(
            f"config.json: no_rope_layers must have a 1 (RoPE) or 0 (none) for each of {num_layers} layers; got {got}"
        )
    return [bool(each) for each in flags[:num_layers]]


def _windows(config: Config, rotates: list[bool]) -> tuple[int | None, ...]:
    """The window of each layer; by default of the layers without RoPE."""
    window = sliding_window(config, None) if flag(config, "use_sliding_window") else None
    default = ["full_attention" if has_rope or window is None else "sliding_attention" for has_rope in rotates]
    return layer_windows(config, default, window, has_switch=True)


ARCHITECTURES = {
    "LlamaForCausalLM": _read_llama,
    "Phi3ForCausalLM": _read_phi3,
    "SeedOssForCausalLM": _read_seed_oss,
    "SmolLM3ForCausalLM": _read_smollm3,
}
