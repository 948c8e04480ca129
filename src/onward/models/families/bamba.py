"""Bamba: Mamba2 (arXiv 2405.21060) in most layers, attention with half of a head turning in the others."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder, DecoderNames, LayerNames
from onward.models.blocks.layer import Mixer
from onward.models.config import check_attends, common_fields
from onward.models.fields import flag
from onward.models.mamba_fields import FULL, LINEAR, layers_by_index, mamba_block

ARCHITECTURES = ("BambaForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    config.get("z_loss_coefficient")  # of the training
    fields = common_fields(config, partial_rotary=0.5, default_eps=1e-5)
    bias = flag(config, "attention_bias")
    mixers: dict[str, Mixer] = {FULL: fields.attention(qkv_bias=bias, o_bias=bias), LINEAR: mamba_block(config, fields)}
    feed_forward = fields.feed_forward(bias=flag(config, "mlp_bias"))
    types = layers_by_index(config, "attn_layer_indices", fields.num_layers)
    check_attends(types, name="attn_layer_indices")
    return fields.decoder(
        (
            fields.layer(mixers[kind], feed_forward, names=names(mixer="self_attn" if kind == FULL else "mamba"))
            for kind in types
        ),
        names=DecoderNames(norm="model.final_layernorm"),
    )


def names(mixer: str) -> LayerNames:
    """What checkpoints of this family and its kin call the parts of a layer."""
    return LayerNames(mixer=mixer, feed_forward_norm="pre_ff_layernorm", feed_forward="feed_forward")
