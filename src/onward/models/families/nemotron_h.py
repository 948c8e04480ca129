"""Nemotron-H and Nemotron 3 (arXiv 2504.03624): layers of one block each: Mamba2, attention without positions, a
feed-forward block of relu2, or experts of such."""

from collections.abc import Mapping
from typing import Any

from onward.errors import ConfigError
from onward.models import mamba_fields
from onward.models.blocks import Decoder, DecoderLayer, DecoderNames, Experts, LayerNames, UngatedFeedForward
from onward.models.config import CommonFields, common_fields, only
from onward.models.expert_fields import expert_groups, experts_per_token
from onward.models.fields import Overlaid, flag, positive_int, positive_number
from onward.models.mamba_fields import FULL, LINEAR, hybrid_types, mamba2

ARCHITECTURES = ("NemotronHForCausalLM",)

_MLP, _MOE = "mlp", "moe"
_BY_LETTER = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _MOE}
_ONLY: dict[str, Any] = {
    "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "attention_bias": False, "residual_in_fp32": False,
    "mamba_proj_bias": False, "n_shared_experts": 1,
}  # fmt: skip
# Of layers that predict several tokens, of the training, and what follows from other fields.
_NO_SAY = (
    *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("moe_shared_expert_overlap", "expand", "time_step_limit"),
)
# Of experts and of Mamba2, which files name for models without such layers too.
_OF_BLOCKS = (
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("moe_latent_size", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
    *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_bias", "use_conv_bias"),
    *("mlp_bias", *mamba_fields.NO_SAY),
)
_LAYER = LayerNames(mixer_norm="norm", mixer="mixer", feed_forward_norm="norm", feed_forward="mixer")


def read_config(config: Mapping[str, Any]) -> Decoder:
    for name, value in _ONLY.items():
        only(config, name, value)
    for name in (*_NO_SAY, *_OF_BLOCKS):
        config.get(name)
    eps = positive_number(config, "layer_norm_epsilon", 1e-5)
    for name in ("norm_eps", "rms_norm_eps"):
        if config.get(name) not in (None, eps):
            raise ConfigError(f"config.json: {name} is {config[name]!r} and layer_norm_epsilon {eps!r}: keep one")
    types = _layer_types(config)
    head_dim = {"head_dim": config.get("attention_head_dim")}
    sizes = {"num_hidden_layers": len(types), "rms_norm_eps": eps, "hidden_act": "silu"}
    fields = common_fields(Overlaid(sizes, config, head_dim), default_head_dim=128)
    layers = {kind: _layer(config, fields, kind) for kind in dict.fromkeys(types)}
    return fields.decoder(
        (layers[kind] for kind in types),
        norm=fields.norm(after_cast=False),
        names=DecoderNames("backbone.embeddings", "backbone.layers", "backbone.norm_f"),
        unread=("mtp.",),
    )


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """The block of each layer: by name, or by a pattern of letters."""
    pattern, types = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if types is None and isinstance(pattern, str) and set(pattern) <= set(_BY_LETTER):
        types = [_BY_LETTER[letter] for letter in pattern]
    if not isinstance(types, list) or not types:
        raise ConfigError(
            "config.json: this family wants hybrid_override_pattern, a letter of "
            f"{', '.join(_BY_LETTER)} for each layer, or layers_block_type; got {pattern!r} and {types!r}"
        )
    count = positive_int(config, "num_hidden_layers", len(types))
    return hybrid_types({"layers_block_type": types}, "layers_block_type", count, also=(_MLP, _MOE))


def _layer(config: Mapping[str, Any], fields: CommonFields, kind: str) -> DecoderLayer:
    norm = fields.norm(after_cast=False)
    if kind == FULL:
        return DecoderLayer(fields.attention(rope=None), None, mixer_norm=norm, names=_LAYER)
    if kind == LINEAR:
        return DecoderLayer(_mamba(config, fields), None, mixer_norm=norm, names=_LAYER)
    block = _experts(config, fields) if kind == _MOE else _feed_forward(config, fields.intermediate_size, fields)
    return DecoderLayer(None, block, feed_forward_norm=norm, names=_LAYER)


def _mamba(config: Mapping[str, Any], fields: CommonFields) -> Any:
    bias = flag(config, "use_bias")
    return mamba2(
        config,
        fields,
        heads=positive_int(config, "mamba_num_heads", 128),
        head_dim=positive_int(config, "mamba_head_dim", 64),
        groups=positive_int(config, "n_groups", 8),
        state_dim=positive_int(config, "ssm_state_size", 128),
        taps=positive_int(config, "conv_kernel", 4),
        conv_bias=flag(config, "use_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
        limits=(positive_number(config, "time_step_min", 0.001), float("inf")),
    )


def _feed_forward(config: Mapping[str, Any], inner: int, fields: CommonFields) -> UngatedFeedForward:
    return UngatedFeedForward(fields.hidden_size, inner, flag(config, "mlp_bias"))


def _experts(config: Mapping[str, Any], fields: CommonFields) -> Experts:
    count = positive_int(config, "n_routed_experts", 8)
    chosen = experts_per_token(config, count, default=2)
    groups, kept_groups = expert_groups(config, count, chosen)
    shared = positive_int(config, "moe_shared_expert_intermediate_size", 7688)
    latent = config.get("moe_latent_size")
    return Experts(
        hidden_size=fields.hidden_size,
        intermediate_size=positive_int(config, "moe_intermediate_size", 7688),
        num_experts=count,
        num_chosen=chosen,
        score="sigmoid",
        normalize=flag(config, "norm_topk_prob", default=True),
        scale=positive_number(config, "routed_scaling_factor", 1.0),
        groups=groups,
        kept_groups=kept_groups,
        choice_bias=True,
        float32_router=True,
        shared=_feed_forward(config, shared, fields),
        activation="relu2",
        latent_dim=None if latent is None else positive_int(config, "moe_latent_size"),
        latent_bias=flag(config, "mlp_bias"),
    )
