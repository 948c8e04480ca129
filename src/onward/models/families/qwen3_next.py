"""Qwen3-Next: three layers of Gated DeltaNet (arXiv 2412.06464) to one of attention with an output gate; experts.

Layers that predict several tokens (`mtp.*`) are not part of this forward.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Decoder, ExpertNames, Experts, GatedDelta, LayerNames
from onward.models.blocks.layer import TokenBlock
from onward.models.config import CommonFields, check_attends, check_layer_types, common_fields
from onward.models.expert_fields import experts_per_token, layers_with_experts, qwen_expert_count
from onward.models.fields import flag, positive_int

ARCHITECTURES = ("Qwen3NextForCausalLM",)

# Fields of experts and of the block beside them.
_OF_EXPERTS = (
    *("num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("num_experts", "num_local_experts"),
)
_FULL, _LINEAR = "full_attention", "linear_attention"


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = hybrid_fields(config)
    sparse = layers_with_experts(config, fields.num_layers)
    if config.get("num_experts") == 0:
        for name in _OF_EXPERTS:
            config.get(name)  # of experts that no layer has
        blocks: list[TokenBlock] = [fields.feed_forward()] * fields.num_layers
    else:
        normalize = flag(config, "norm_topk_prob", default=True)
        experts = gated_experts(config, fields, default_count=512, default_chosen=10, normalize=normalize)
        blocks = [experts if has_experts else fields.feed_forward() for has_experts in sparse]
    return hybrid_decoder(config, fields, blocks, fused=True, unread=("mtp.",))


def hybrid_fields(config: Mapping[str, Any]) -> CommonFields:
    """The common fields of this family and its kin."""
    return common_fields(config, default_head_dim=256, partial_rotary=0.25)


def gated_experts(
    config: Mapping[str, Any], fields: CommonFields, *, default_count: int, default_chosen: int, normalize: bool
) -> Experts:
    """Experts beside a block that all tokens go through, which has a gate."""
    count = qwen_expert_count(config, default_count)
    return Experts(
        hidden_size=fields.hidden_size,
        intermediate_size=positive_int(config, "moe_intermediate_size", 512),
        num_experts=count,
        num_chosen=experts_per_token(config, count, default=default_chosen),
        normalize=normalize,
        shared=fields.feed_forward(intermediate_size=positive_int(config, "shared_expert_intermediate_size", 512)),
        shared_gate=True,
        names=ExpertNames(shared="shared_expert"),
    )


def hybrid_decoder(
    config: Mapping[str, Any], fields: CommonFields, blocks: Sequence[TokenBlock], *, fused: bool, **changes: Any
) -> Decoder:
    """The decoder of a config of this family or its kin.

    Args:
        blocks: the feed-forward block or experts of each layer.
        fused: as in `GatedDelta`.
        changes: fields of `Decoder` that differ.
    """
    norm, bias = fields.norm(offset=1.0), flag(config, "attention_bias")
    head_norm = fields.norm(fields.head_dim, offset=1.0)
    attention = fields.attention(qkv_bias=bias, o_bias=bias, q_norm=head_norm, k_norm=head_norm, output_gate=True)
    delta, linear = _delta(config, fields, fused), LayerNames(mixer="linear_attn")
    layers = [
        fields.layer(
            attention if kind == _FULL else delta,
            block,
            mixer_norm=norm,
            feed_forward_norm=norm,
            names=LayerNames() if kind == _FULL else linear,
        )
        for kind, block in zip(_layer_types(config, fields.num_layers), blocks, strict=True)
    ]
    return fields.decoder(layers, norm=norm, **changes)


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
    check_attends(types)
    return list(types)
