"""LFM2 (arXiv 2511.23404): gated short convolutions in most layers, attention with norms of heads in the others."""

from collections.abc import Mapping, Sequence
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import (
    AttentionNames,
    Decoder,
    DecoderNames,
    FeedForwardNames,
    GatedConv,
    LayerNames,
)
from onward.models.blocks.layer import TokenBlock
from onward.models.config import CommonFields, check_attends, check_layer_types, common_fields, only
from onward.models.fields import Overlaid, flag, positive_int, positive_number

ARCHITECTURES = ("Lfm2ForCausalLM",)

FEED_FORWARD = FeedForwardNames("w1", "w3", "w2")
_FULL, _CONV = "full_attention", "conv"
# Of how the weights were drawn before the training.
_NO_SAY = "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = conv_fields(config)
    width = _adjusted(config, fields.intermediate_size)
    feed_forward = fields.feed_forward(intermediate_size=width, names=FEED_FORWARD)
    return conv_decoder(config, fields, [feed_forward] * fields.num_layers)


def conv_fields(config: Mapping[str, Any]) -> CommonFields:
    """The common fields under the names that this family gives them."""
    shared = {"intermediate_size": config.get("block_ff_dim"), "tie_word_embeddings": config.get("tie_embedding")}
    eps = positive_number(config, "norm_eps", 1e-5)
    fields = common_fields(Overlaid(shared, {"rms_norm_eps": eps}, config), default_tie=True, default_base=1e6)
    hidden = fields.hidden_size
    same = {"block_dim": hidden, "conv_dim": hidden, "conv_dim_out": hidden, "num_heads": fields.num_heads}
    for name, value in (same | {"block_norm_eps": eps, "block_use_swiglu": True, "use_pos_enc": True}).items():
        only(config, name, value)
    for name in _NO_SAY:
        config.get(name)
    return fields


def conv_decoder(config: Mapping[str, Any], fields: CommonFields, feed_forwards: Sequence[TokenBlock]) -> Decoder:
    """The decoder of this family or its kin. feed_forwards: the block of each layer."""
    norm = fields.norm(fields.head_dim)
    attention = fields.attention(
        q_norm=norm, k_norm=norm, names=AttentionNames(o_proj="out_proj", q_norm="q_layernorm", k_norm="k_layernorm")
    )
    conv = GatedConv(fields.hidden_size, positive_int(config, "conv_L_cache", 3), flag(config, "conv_bias"))
    names = {
        kind: LayerNames("operator_norm", mixer, "", "ffn_norm", "feed_forward")
        for kind, mixer in ((_FULL, "self_attn"), (_CONV, "conv"))
    }
    return fields.decoder(
        (
            fields.layer(attention if kind == _FULL else conv, feed_forward, names=names[kind])
            for kind, feed_forward in zip(_layer_types(config, fields.num_layers), feed_forwards, strict=True)
        ),
        names=DecoderNames(norm="model.embedding_norm"),
    )


def _adjusted(config: Mapping[str, Any], size: int) -> int:
    """The inner width: two thirds of what the config says, rounded up, unless the config says that it is exact."""
    multiple = positive_int(config, "block_multiple_of", 256)
    factor = positive_number(config, "block_ffn_dim_multiplier", 1.0)
    if not flag(config, "block_auto_adjust_ff_dim", default=True):
        return size
    return multiple * -(-int(factor * int(2 * size / 3)) // multiple)


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """What each layer mixes with: `layer_types`, or attention in those that `full_attn_idxs` names, or in all."""
    types, attending = config.get("layer_types"), config.get("full_attn_idxs")
    if attending is not None:
        if not isinstance(attending, list) or any(type(i) is not int or not 0 <= i < num_layers for i in attending):
            raise ConfigError(
                f"config.json: full_attn_idxs must be a list of layers from 0 to {num_layers - 1}; got {attending!r}"
            )
        by_index = [_FULL if index in attending else _CONV for index in range(num_layers)]
        if types is not None and types != by_index:
            raise ConfigError(f"config.json: layer_types and full_attn_idxs {attending} name other layers: keep one")
        types = by_index
    types = [_FULL] * num_layers if types is None else types
    check_layer_types(types, num_layers, (_FULL, _CONV))
    check_attends(types)
    return list(types)
