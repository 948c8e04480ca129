"""LFM2 (arXiv 2511.23404), dense and with experts: gated short convolutions in most layers, attention with norms of
heads in the others."""

from collections.abc import Sequence

from onward.errors import ConfigError
from onward.models.blocks import (
    AttentionNames,
    Decoder,
    DecoderNames,
    ExpertNames,
    FeedForwardNames,
    LayerNames,
    ShortConvMixer,
)
from onward.models.blocks.layer import TokenBlock
from onward.models.config import CommonFields, check_attends, common_fields, ignore, layer_types, only
from onward.models.family_fields import FULL, layers_by_index, num_dense_layers, routed_experts
from onward.models.fields import Config, FieldOverlay, flag, positive_int, positive_number

_FEED_FORWARD = FeedForwardNames("w1", "w3", "w2")
_CONV = "conv"


def _read_lfm2(config: Config) -> Decoder:
    fields = _fields(config)
    width = _adjusted(config, fields.intermediate_size)
    feed_forward = fields.feed_forward(intermediate_size=width, names=_FEED_FORWARD)
    return _decoder(config, fields, [feed_forward] * fields.num_layers)


def _read_lfm2_moe(config: Config) -> Decoder:
    """Experts chosen by sigmoids, in all layers but the first."""
    fields = _fields(config)
    experts = routed_experts(
        config,
        fields,
        positive_int(config, "num_experts", 32),
        4,
        intermediate_size=positive_int(config, "moe_intermediate_size", 1792),
        score="sigmoid",
        normalize=flag(config, "norm_topk_prob", default=True),
        sum_eps=1e-6,
        scale=positive_number(config, "routed_scaling_factor", 1.0),
        choice_bias=flag(config, "use_expert_bias", default=True),
        names=ExpertNames(choice_bias="expert_bias", gate_proj="w1", up_proj="w3", down_proj="w2"),
    )
    first = num_dense_layers(config, 2, "num_dense_layers")
    feed_forward = fields.feed_forward(names=_FEED_FORWARD)
    return _decoder(config, fields, [feed_forward if i < first else experts for i in range(fields.num_layers)])


def _fields(config: Config) -> CommonFields:
    """The common fields, under this family's names."""
    shared = {"intermediate_size": config.get("block_ff_dim"), "tie_word_embeddings": config.get("tie_embedding")}
    eps = positive_number(config, "norm_eps", 1e-5)
    fields = common_fields(FieldOverlay(shared, {"rms_norm_eps": eps}, config), default_tie=True, base=1e6)
    hidden = fields.hidden_size
    only(config, block_dim=hidden, conv_dim=hidden, conv_dim_out=hidden, num_heads=fields.num_heads)
    only(config, block_norm_eps=eps, block_use_swiglu=True, use_pos_enc=True)
    # How weights were initialised.
    ignore(config, "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
    return fields


def _decoder(config: Config, fields: CommonFields, feed_forwards: Sequence[TokenBlock]) -> Decoder:
    norm = fields.norm(fields.head_dim)
    attention = fields.attention(
        q_norm=norm, k_norm=norm, names=AttentionNames(o_proj="out_proj", q_norm="q_layernorm", k_norm="k_layernorm")
    )
    conv = ShortConvMixer(fields.hidden_size, positive_int(config, "conv_L_cache", 3), flag(config, "conv_bias"))
    names = {
        kind: LayerNames("operator_norm", mixer, "", "ffn_norm", "feed_forward")
        for kind, mixer in ((FULL, "self_attn"), (_CONV, "conv"))
    }
    return fields.decoder(
        (
            fields.layer(attention if kind == FULL else conv, feed_forward, names=names[kind])
            for kind, feed_forward in zip(_layer_types(config, fields.num_layers), feed_forwards, strict=True)
        ),
        names=DecoderNames(norm="model.embedding_norm"),
    )


def _adjusted(config: Config, size: int) -> int:
    """The inner width: two thirds of the config's, rounded up, unless auto-adjustment is off."""
    multiple = positive_int(config, "block_multiple_of", 256)
    factor = positive_number(config, "block_ffn_dim_multiplier", 1.0)
    if not flag(config, "block_auto_adjust_ff_dim", default=True):
        return size
    return multiple * -(-int(factor * int(2 * size / 3)) // multiple)


def _layer_types(config: Config, num_layers: int) -> tuple[str, ...]:
    """The mixer of each layer: `layer_types`, or attention in the layers of `full_attn_idxs`, or in all."""
    attention_layers, default = config.get("full_attn_idxs"), [FULL] * num_layers
    if attention_layers is not None:
        default = layers_by_index(config, "full_attn_idxs", num_layers, _CONV)
        if config.get("layer_types") not in (None, default):
            raise ConfigError(f"config.json: layer_types and full_attn_idxs {attention_layers} differ: keep one")
    types = layer_types(config, default, (FULL, _CONV))
    check_attends(types)
    return types


ARCHITECTURES = {"Lfm2ForCausalLM": _read_lfm2, "Lfm2MoeForCausalLM": _read_lfm2_moe}
