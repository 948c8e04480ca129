"""Qwen3-Next: three layers of Gated DeltaNet (arXiv 2412.06464) to one of attention with an output gate."""

from collections.abc import Mapping
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Decoder, GatedDelta, LayerNames
from onward.models.config import CommonFields, check_layer_types, common_fields
from onward.models.fields import flag, positive_int

ARCHITECTURES = ("Qwen3NextForCausalLM",)

_FULL, _LINEAR = "full_attention", "linear_attention"


def read_config(config: Mapping[str, Any]) -> Decoder:
    _check_dense(config)
    return hybrid_decoder(config, fused=True)


def hybrid_decoder(config: Mapping[str, Any], *, fused: bool, **changes: Any) -> Decoder:
    """The decoder of a config of this family or its kin.

    Args:
        fused: as in `GatedDelta`.
        changes: fields of `Decoder` that differ.
    """
    fields = common_fields(config, default_head_dim=256, partial_rotary=0.25)
    norm, bias = fields.norm(offset=1.0), flag(config, "attention_bias")
    head_norm = fields.norm(fields.head_dim, offset=1.0)
    attention = fields.attention(qkv_bias=bias, o_bias=bias, q_norm=head_norm, k_norm=head_norm, output_gate=True)
    around = {"mixer_norm": norm, "feed_forward_norm": norm}
    full = fields.layer(attention, fields.feed_forward(), **around)
    linear = fields.layer(
        _delta(config, fields, fused), fields.feed_forward(), **around, names=LayerNames(mixer="linear_attn")
    )
    types = _layer_types(config, fields.num_layers)
    return fields.decoder([full if kind == _FULL else linear for kind in types], norm=norm, **changes)


def _delta(config: Mapping[str, Any], fields: CommonFields, fused: bool) -> GatedDelta:
    key_heads = positive_int(config, "linear_num_key_heads", 16)
    value_heads = positive_int(config, "linear_num_value_heads", 32)
    value_dim = positive_int(config, "linear_value_head_dim", 128, most=256)
    if value_heads % key_heads:
        raise ConfigError(
            f"config.json: linear_num_value_heads ({value_heads}) must be a multiple of linear_num_key_heads "
            f"({key_heads})"
        )
    return GatedDelta(
        hidden_size=fields.hidden_size,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=positive_int(config, "linear_key_head_dim", 128, most=256),
        value_dim=value_dim,
        taps=positive_int(config, "linear_conv_kernel_dim", 4),
        norm=fields.norm(value_dim),
        fused=fused,
    )


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """What each layer mixes with: every fourth attends, unless the config says otherwise."""
    interval = positive_int(config, "full_attention_interval", 4)
    types = config.get("layer_types")
    if types is None:
        types = [_LINEAR if (index + 1) % interval else _FULL for index in range(num_layers)]
    check_layer_types(types, num_layers, (_FULL, _LINEAR))
    if _FULL not in types:
        raise ConfigError(
            "config.json: at least one layer of this family must be 'full_attention'; layer_types has none"
        )
    return list(types)


def _check_dense(config: Mapping[str, Any]) -> None:
    """Raise where a layer has experts."""
    num_layers, dense = positive_int(config, "num_hidden_layers"), config.get("mlp_only_layers") or []
    experts, step = config.get("num_experts", 512), positive_int(config, "decoder_sparse_step", 1)
    sparse = [index for index in range(num_layers) if index not in dense and (index + 1) % step == 0]
    if experts and sparse:
        raise ConfigError(
            f"config.json: layers {sparse[:4]} of {num_layers} have experts, which are not supported in this family: "
            "num_experts must be 0, or mlp_only_layers must name every layer"
        )
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "norm_topk_prob"):
        config.get(name)  # of experts that no layer has
