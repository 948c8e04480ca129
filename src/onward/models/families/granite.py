"""Granite 3 (arXiv 2405.04324): Llama with factors on embedding, residual branches, scores and logits."""

from collections.abc import Iterable, Mapping
from typing import Any

from onward.models.blocks import Attention, Decoder
from onward.models.blocks.layer import Mixer, TokenBlock
from onward.models.config import CommonFields, common_fields
from onward.models.fields import flag, positive_number

ARCHITECTURES = ("GraniteForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config)
    blocks = granite_attention(config, fields), fields.feed_forward(bias=flag(config, "mlp_bias"))
    return granite_decoder(config, fields, [(*blocks, {})] * fields.num_layers)


def granite_attention(config: Mapping[str, Any], fields: CommonFields, **changes: Any) -> Attention:
    """The attention of this family and its kin. changes: fields of `Attention` that differ."""
    bias, scale = flag(config, "attention_bias"), positive_number(config, "attention_multiplier", 1.0)
    return fields.attention(qkv_bias=bias, o_bias=bias, scale=scale, **changes)


def granite_decoder(
    config: Mapping[str, Any],
    fields: CommonFields,
    layers: Iterable[tuple[Mixer, TokenBlock, Mapping[str, Any]]],
) -> Decoder:
    """The decoder of this family or its kin. layers: mixer and feed-forward block of each, and fields that differ."""
    multiplier = positive_number(config, "residual_multiplier", 1.0)
    return fields.decoder(
        (fields.layer(mixer, block, residual_multiplier=multiplier, **changes) for mixer, block, changes in layers),
        embedding_multiplier=positive_number(config, "embedding_multiplier", 1.0),
        logits_multiplier=1 / positive_number(config, "logits_scaling", 1.0),
    )
