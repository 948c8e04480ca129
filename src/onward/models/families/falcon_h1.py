"""Falcon-H1 (arXiv 2507.22448): attention and Mamba2 side by side in each layer, with factors on nearly everything."""

from collections.abc import Mapping
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Decoder, DecoderNames, SideBySide
from onward.models.config import CommonFields, common_fields, only
from onward.models.families.bamba import names
from onward.models.fields import flag, number, positive_int
from onward.models.mamba_fields import mamba_block

ARCHITECTURES = ("FalconH1ForCausalLM",)

_OF_OTHERS = "attn_layer_indices", "mlp_expansion_factor"  # that files have and no forward asks for


def read_config(config: Mapping[str, Any]) -> Decoder:
    only(config, "mamba_use_mlp", True)
    for name in _OF_OTHERS:
        config.get(name)
    fields = common_fields(config, default_eps=1e-5)
    gate, down = _numbers(config, "mlp_multipliers", 2)
    feed_forward = fields.feed_forward(bias=flag(config, "mlp_bias"), gate_multiplier=gate, down_multiplier=down)
    layer = fields.layer(_mixer(config, fields), feed_forward, names=names(mixer=""))
    return fields.decoder(
        [layer] * fields.num_layers,
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        logits_multiplier=number(config, "lm_head_multiplier", 1.0),
        names=DecoderNames(norm="model.final_layernorm"),
    )


def _mixer(config: Mapping[str, Any], fields: CommonFields) -> SideBySide:
    inner = (
        None if "mamba_d_ssm" in config and config["mamba_d_ssm"] is None else positive_int(config, "mamba_d_ssm", 1024)
    )
    bias = flag(config, "attention_bias")
    norm_first = flag(config, "mamba_norm_before_gate", default=True)
    mamba = mamba_block(
        config,
        fields,
        inner=inner,
        norm_first=norm_first,
        out_bias=flag(config, "projectors_bias"),
        in_multiplier=number(config, "ssm_in_multiplier", 1.0),
        multipliers=_numbers(config, "ssm_multipliers", 5),
        **({} if flag(config, "mamba_rms_norm") else {"norm": None}),
    )
    return SideBySide(
        # A factor of keys is one of the products.
        attention=fields.attention(
            qkv_bias=bias, o_bias=bias, scale=fields.head_dim**-0.5 * number(config, "key_multiplier", 1.0)
        ),
        recurrent=mamba,
        attention_in=number(config, "attention_in_multiplier", 1.0),
        attention_out=number(config, "attention_out_multiplier", 1.0),
        recurrent_out=number(config, "ssm_out_multiplier", 1.0),
    )


def _numbers(config: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    """So many factors; 1 by default."""
    values = config.get(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count:
        raise ConfigError(f"config.json: {name} must be a list of {count} numbers; got {values!r}")
    return tuple(number({name: value}, name) for value in values)
