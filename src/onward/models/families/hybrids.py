"""Bamba: Mamba2 (arXiv 2405.21060) in most layers, attention with half-rotated heads in the others.
Falcon-H1 (arXiv 2507.22448): attention and Mamba2 in parallel in each layer, with factors on nearly everything.
Nemotron-H and Nemotron 3 (arXiv 2504.03624): each layer is one block: Mamba2, attention without RoPE, a relu2
feed-forward block, or relu2 experts."""

from onward.errors import ConfigError
from onward.models.blocks import (
    Decoder,
    DecoderLayer,
    DecoderNames,
    Experts,
    LayerNames,
    Mamba2,
    ParallelMixer,
    UngatedFeedForward,
)
from onward.models.blocks.layer import Mixer
from onward.models.config import CommonFields, attention_biases, check_attends, common_fields, ignore, only
from onward.models.family_fields import (
    FULL,
    LINEAR,
    MAMBA_FIELDS,
    grouped_experts,
    hybrid_types,
    layers_by_index,
    mamba2,
    mamba_block,
    routed_experts,
)
from onward.models.fields import Config, FieldOverlay, flag, number, positive_int, positive_number, words

_FINAL = DecoderNames(norm="model.final_layernorm")


def _names(mixer: str) -> LayerNames:
    """The names of Bamba and Falcon-H1."""
    return LayerNames(mixer=mixer, feed_forward_norm="pre_ff_layernorm", feed_forward="feed_forward")


def _read_bamba(config: Config) -> Decoder:
    ignore(config, "z_loss_coefficient")  # of the training
    fields = common_fields(config, partial=0.5, default_eps=1e-5)
    attention = fields.attention(**attention_biases(config))
    mixers: dict[str, Mixer] = {FULL: attention, LINEAR: mamba_block(config, fields)}
    feed_forward = fields.feed_forward(bias=flag(config, "mlp_bias"))
    types = layers_by_index(config, "attn_layer_indices", fields.num_layers, LINEAR)
    check_attends(types, name="attn_layer_indices")
    layers = {
        kind: fields.layer(mixer, feed_forward, names=_names("self_attn" if kind == FULL else "mamba"))
        for kind, mixer in mixers.items()
    }
    return fields.decoder((layers[kind] for kind in types), names=_FINAL)


def _read_falcon_h1(config: Config) -> Decoder:
    only(config, mamba_use_mlp=True)
    ignore(config, "attn_layer_indices", "mlp_expansion_factor")  # without effect
    fields = common_fields(config, default_eps=1e-5)
    gate, down = _numbers(config, "mlp_multipliers", 2)
    feed_forward = fields.feed_forward(bias=flag(config, "mlp_bias"), gate_multiplier=gate, down_multiplier=down)
    layer = fields.layer(_side_by_side(config, fields), feed_forward, names=_names(mixer=""))
    return fields.decoder(
        [layer] * fields.num_layers,
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        logits_multiplier=number(config, "lm_head_multiplier", 1.0),
        names=_FINAL,
    )


def _side_by_side(config: Config, fields: CommonFields) -> ParallelMixer:
    by_width = "mamba_d_ssm" in config and config["mamba_d_ssm"] is None
    mamba = mamba_block(
        config,
        fields,
        inner=None if by_width else positive_int(config, "mamba_d_ssm", 1024),
        norm_first=flag(config, "mamba_norm_before_gate", default=True),
        out_bias=flag(config, "projectors_bias"),
        in_multiplier=number(config, "ssm_in_multiplier", 1.0),
        multipliers=_numbers(config, "ssm_multipliers", 5),
        **({} if flag(config, "mamba_rms_norm") else {"norm": None}),
    )
    # A factor of keys is a factor of the scores.
    scale = fields.head_dim**-0.5 * number(config, "key_multiplier", 1.0)
    return ParallelMixer(
        attention=fields.attention(**attention_biases(config), scale=scale),
        recurrent=mamba,
        attention_in=number(config, "attention_in_multiplier", 1.0),
        attention_out=number(config, "attention_out_multiplier", 1.0),
        recurrent_out=number(config, "ssm_out_multiplier", 1.0),
    )


def _numbers(config: Config, name: str, count: int) -> tuple[float, ...]:
    """A list of `count` factors; 1 by default."""
    values = config.get(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count:
        raise ConfigError(f"config.json: {name} must be a list of {count} numbers; got {values!r}")
    return tuple(number({name: value}, name) for value in values)


_MLP, _MOE = "mlp", "moe"
_BY_LETTER = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _MOE}
# Fields of multi-token prediction and training, fields that follow from others, and fields of experts and Mamba2, which
# files have even without such layers.
_NO_EFFECT = words("""
    num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern moe_shared_expert_overlap expand
    time_step_limit n_routed_experts num_experts_per_tok moe_intermediate_size moe_shared_expert_intermediate_size
    moe_latent_size n_group topk_group norm_topk_prob routed_scaling_factor mamba_num_heads mamba_head_dim n_groups
    ssm_state_size conv_kernel use_bias use_conv_bias mlp_bias
""")
_LAYER = LayerNames(mixer_norm="norm", mixer="mixer", feed_forward_norm="norm", feed_forward="mixer")


def _read_nemotron_h(config: Config) -> Decoder:
    only(config, mlp_hidden_act="relu2", mamba_hidden_act="silu", attention_bias=False, residual_in_fp32=False)
    only(config, mamba_proj_bias=False, n_shared_experts=1)
    ignore(config, *_NO_EFFECT, *MAMBA_FIELDS)
    eps = positive_number(config, "layer_norm_epsilon", 1e-5)
    for name in ("norm_eps", "rms_norm_eps"):
        if config.get(name) not in (None, eps):
            raise ConfigError(f"config.json: {name} is {config[name]!r} and layer_norm_epsilon {eps!r}: keep one")
    types = _layer_types(config)
    head_dim = {"head_dim": config.get("attention_head_dim")}
    sizes = {"num_hidden_layers": len(types), "rms_norm_eps": eps, "hidden_act": "silu"}
    fields = common_fields(FieldOverlay(sizes, config, head_dim), default_head_dim=128)
    layers = {kind: _layer(config, fields, kind) for kind in dict.fromkeys(types)}
    return fields.decoder(
        (layers[kind] for kind in types),
        norm=fields.norm(after_cast=False),
        names=DecoderNames("backbone.embeddings", "backbone.layers", "backbone.norm_f"),
        unread=("mtp.",),
    )


def _layer_types(config: Config) -> list[str]:
    """The block of each layer, by name or by a pattern of letters."""
    pattern, types = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if types is None and isinstance(pattern, str) and set(pattern) <= set(_BY_LETTER):
        types = [_BY_LETTER[letter] for letter in pattern]
    if not isinstance(types, list) or not types:
        raise ConfigError(
            "config.json: this family needs hybrid_override_pattern, a letter of "
            f"{', '.join(_BY_LETTER)} for each layer, or layers_block_type; got {pattern!r} and {types!r}"
        )
    count = positive_int(config, "num_hidden_layers", len(types))
    return hybrid_types({"layers_block_type": types}, "layers_block_type", count, also=(_MLP, _MOE))


def _layer(config: Config, fields: CommonFields, kind: str) -> DecoderLayer:
    norm = fields.norm(after_cast=False)
    if kind in (FULL, LINEAR):
        mixer: Mixer = fields.attention(rope=None) if kind == FULL else _mamba(config, fields)
        return DecoderLayer(mixer, None, mixer_norm=norm, names=_LAYER)
    block = _experts(config, fields) if kind == _MOE else _feed_forward(config, fields.intermediate_size, fields)
    return DecoderLayer(None, block, feed_forward_norm=norm, names=_LAYER)


def _mamba(config: Config, fields: CommonFields) -> Mamba2:
    bias = flag(config, "use_bias")
    return mamba2(
        config, fields,
        heads=positive_int(config, "mamba_num_heads", 128),
        head_dim=positive_int(config, "mamba_head_dim", 64),
        groups=positive_int(config, "n_groups", 8),
        state_dim=positive_int(config, "ssm_state_size", 128),
        kernel_size=positive_int(config, "conv_kernel", 4),
        conv_bias=flag(config, "use_conv_bias", default=True),
        in_bias=bias, out_bias=bias, limits=(positive_number(config, "time_step_min", 0.001), float("inf")),
    )  # fmt: skip


def _feed_forward(config: Config, inner: int, fields: CommonFields) -> UngatedFeedForward:
    return UngatedFeedForward(fields.hidden_size, inner, flag(config, "mlp_bias"))


def _experts(config: Config, fields: CommonFields) -> Experts:
    latent = config.get("moe_latent_size")
    experts = routed_experts(
        config, fields, positive_int(config, "n_routed_experts", 8), 2, score="sigmoid", activation="relu2",
        intermediate_size=positive_int(config, "moe_intermediate_size", 7688),
        normalize=flag(config, "norm_topk_prob", default=True),
        scale=positive_number(config, "routed_scaling_factor", 1.0), choice_bias=True, float32_router=True,
        shared=_feed_forward(config, positive_int(config, "moe_shared_expert_intermediate_size", 7688), fields),
        latent_dim=None if latent is None else positive_int(config, "moe_latent_size"),
        latent_bias=flag(config, "mlp_bias"),
    )  # fmt: skip
    return grouped_experts(config, experts)


ARCHITECTURES = {
    "BambaForCausalLM": _read_bamba,
    "FalconH1ForCausalLM": _read_falcon_h1,
    "NemotronHForCausalLM": _read_nemotron_h,
}
