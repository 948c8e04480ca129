"""Qwen2 and 2.5 (arXiv 2407.10671), Qwen3 (arXiv 2505.09388), Qwen3-Next, Qwen3.5 and 3.6; dense, and with experts.

Multi-token prediction layers (`mtp.*`) draft (`onward.models.heads.mtp`). The vision tower of Qwen3.5 and 3.6
(`model.visual.*`) is not used.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Attention, Decoder, ExpertNames, Experts, GatedDelta, LayerNames
from onward.models.blocks.decoder import MtpNames
from onward.models.blocks.layer import TokenBlock
from onward.models.config import (
    CommonFields,
    attention_biases,
    check_attends,
    common_fields,
    ignore,
    layer_types,
    layer_windows,
    read_text_part,
    sliding_window,
)
from onward.models.family_fields import FULL, LINEAR, layers_with_experts, qwen_expert_count, routed_experts
from onward.models.fields import Config, FieldOverlay, flag, positive_int, words

_HYBRID: dict[str, Any] = {"default_head_dim": 256, "partial": 0.25}
# Fields of Qwen3-Next's experts, shared ones included.
_EXPERTS = words("""
    num_experts_per_tok norm_topk_prob moe_intermediate_size shared_expert_intermediate_size num_experts
    num_local_experts
""")
_VISION = words("vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id")
# Fields of some Qwen3.5 files whose value is fixed.
_FIXED = {"attn_output_gate": True, "norm_topk_prob": True, "decoder_sparse_step": 1}
# Fields of multi-token prediction, and of recurrent states, which are always float32.
_NO_EFFECT = words("mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype")


def _read_qwen2(config: Config) -> Decoder:
    """Biases on queries, keys and values."""
    fields = common_fields(config)
    return fields.decoder(fields.windowed(fields.attention(qkv_bias=True), _windows(config, fields.num_layers)))


def _read_qwen3(config: Config) -> Decoder:
    """A norm on every query and key head, no biases."""
    # head_dim defaults to 128, not hidden_size / heads.
    fields = common_fields(config, default_head_dim=128)
    return fields.decoder(fields.windowed(_attention(config, fields), _windows(config, fields.num_layers)))


def _windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, if `use_sliding_window` is set; by default from layer `max_window_layers` on."""
    window = sliding_window(config) if flag(config, "use_sliding_window") else None
    is_unused = config.get("layer_types") is not None or config.get("max_window_layers") == 0
    first = 0 if is_unused else positive_int(config, "max_window_layers", 28)
    default = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers)]
    return layer_windows(config, default, window, has_switch=True)


def _read_qwen3_moe(config: Config) -> Decoder:
    """Qwen3's attention, and experts in all or some layers."""
    fields = common_fields(config)
    window = sliding_window(config) if flag(config, "use_sliding_window") else None
    attention = _attention(config, fields, window=window)
    experts = routed_experts(
        config, fields, qwen_expert_count(config, 128), 8, normalize=flag(config, "norm_topk_prob"),
        intermediate_size=positive_int(config, "moe_intermediate_size", 768),
    )  # fmt: skip
    return fields.decoder(
        fields.layer(attention, experts if sparse else fields.feed_forward())
        for sparse in layers_with_experts(config, fields.num_layers)
    )


def _attention(config: Config, fields: CommonFields, offset: float = 0.0, **changes: Any) -> Attention:
    """offset: of the norms of heads. changes: other fields of `Attention`."""
    norm = fields.norm(fields.head_dim, offset=offset)
    return fields.attention(**attention_biases(config), q_norm=norm, k_norm=norm, **changes)


def _read_qwen3_next(config: Config) -> Decoder:
    """Three Gated DeltaNet layers (arXiv 2412.06464) to one of attention with an output gate; experts."""
    fields = common_fields(config, **_HYBRID)
    sparse = layers_with_experts(config, fields.num_layers)
    if config.get("num_experts") == 0:
        ignore(config, *_EXPERTS)
        blocks: list[TokenBlock] = [fields.feed_forward()] * fields.num_layers
    else:
        experts = _gated_experts(config, fields, 512, 10, flag(config, "norm_topk_prob", default=True))
        blocks = [experts if has_experts else fields.feed_forward() for has_experts in sparse]
    return _hybrid_decoder(config, fields, blocks, fused=True)


def _read_qwen3_5(config: Config, *, sparse: bool = False) -> Decoder:
    """Qwen3-Next's layers with separate projections in Gated DeltaNet; dense, or with experts in all layers."""
    for field, value in _FIXED.items():
        if config.get(field) not in (None, value):
            raise ConfigError(f"config.json: {field} must be {value!r} in this family; got {config[field]!r}")
    ignore(config, *_VISION, *_NO_EFFECT)
    # With experts no layer is dense, so files omit the size of the dense block.
    fields = common_fields(FieldOverlay(config, {"intermediate_size": 1}) if sparse else config, **_HYBRID)
    block: TokenBlock = _gated_experts(config, fields, 256, 8, True) if sparse else fields.feed_forward()
    return _hybrid_decoder(config, fields, [block] * fields.num_layers, fused=False)


def _read_qwen3_5_with_vision(config: Config, *, sparse: bool = False) -> Decoder:
    ignore(config, *_NO_EFFECT)
    return read_text_part(config, partial(_read_qwen3_5, sparse=sparse), _VISION, ("model.visual.", "mtp."))


def _gated_experts(config: Config, fields: CommonFields, count: int, chosen: int, normalize: bool) -> Experts:
    """Experts, and a shared expert with a gate. count, chosen: the default numbers."""
    return routed_experts(
        config, fields, qwen_expert_count(config, count), chosen,
        intermediate_size=positive_int(config, "moe_intermediate_size", 512), normalize=normalize,
        shared=fields.feed_forward(intermediate_size=positive_int(config, "shared_expert_intermediate_size", 512)),
        shared_gate=True, names=ExpertNames(shared="shared_expert"),
    )  # fmt: skip


def _hybrid_decoder(config: Config, fields: CommonFields, blocks: Sequence[TokenBlock], *, fused: bool) -> Decoder:
    """blocks: the feed-forward block or experts of each layer. fused: as in `GatedDelta`."""
    norm = fields.norm(offset=1.0)
    attention = _attention(config, fields, offset=1.0, output_gate=True)
    delta, linear_names = _delta(config, fields, fused), LayerNames(mixer="linear_attn")
    layers = [
        fields.layer(attention, block, mixer_norm=norm, feed_forward_norm=norm)
        if kind == FULL
        else fields.layer(delta, block, mixer_norm=norm, feed_forward_norm=norm, names=linear_names)
        for kind, block in zip(_layer_types(config, fields.num_layers), blocks, strict=True)
    ]
    return fields.decoder(layers, norm=norm, unread=("mtp.",), mtp=MtpNames("mtp"))


def _delta(config: Config, fields: CommonFields, fused: bool) -> GatedDelta:
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
        kernel_size=positive_int(config, "linear_conv_kernel_dim", 4),
        norm=fields.norm(value_dim),
        fused=fused,
    )


def _layer_types(config: Config, num_layers: int) -> tuple[str, ...]:
    """The mixer of each layer: by default attention in every fourth."""
    interval = positive_int(config, "full_attention_interval", 4)
    default = [LINEAR if (index + 1) % interval else FULL for index in range(num_layers)]
    types = layer_types(config, default, (FULL, LINEAR))
    check_attends(types)
    return types


ARCHITECTURES = {
    "Qwen2ForCausalLM": _read_qwen2,
    "Qwen3ForCausalLM": _read_qwen3,
    "Qwen3MoeForCausalLM": _read_qwen3_moe,
    "Qwen3NextForCausalLM": _read_qwen3_next,
    "Qwen3_5ForCausalLM": _read_qwen3_5,
    "Qwen3_5ForConditionalGeneration": _read_qwen3_5_with_vision,
    "Qwen3_5MoeForCausalLM": partial(_read_qwen3_5, sparse=True),
    "Qwen3_5MoeForConditionalGeneration": partial(_read_qwen3_5_with_vision, sparse=True),
}
