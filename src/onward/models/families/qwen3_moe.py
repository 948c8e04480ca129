"""Qwen3's mixtures of experts (arXiv 2505.09388): Qwen3's attention, and experts in all layers or some."""

from collections.abc import Mapping
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Decoder, Experts
from onward.models.config import common_fields, experts_per_token, sliding_window
from onward.models.fields import flag, positive_int

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(config)
    bias = flag(config, "attention_bias")
    norm = fields.norm(fields.head_dim)
    window = sliding_window(config) if flag(config, "use_sliding_window") else None
    attention = fields.attention(qkv_bias=bias, o_bias=bias, q_norm=norm, k_norm=norm, window=window)
    # transformers 5 writes num_local_experts, the checkpoints of the Qwen team num_experts.
    count = positive_int(config, "num_local_experts" if config.get("num_experts") is None else "num_experts", 128)
    experts = Experts(
        hidden_size=fields.hidden_size,
        intermediate_size=positive_int(config, "moe_intermediate_size", 768),
        num_experts=count,
        num_chosen=experts_per_token(config, count, default=8),
        normalize=flag(config, "norm_topk_prob"),
    )
    step, dense = positive_int(config, "decoder_sparse_step", 1), _dense_layers(config)
    return fields.decoder(
        fields.layer(attention, experts if index not in dense and (index + 1) % step == 0 else fields.feed_forward())
        for index in range(fields.num_layers)
    )


def _dense_layers(config: Mapping[str, Any]) -> list[int]:
    """The layers without experts."""
    layers = config.get("mlp_only_layers") or []
    if not isinstance(layers, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in layers):
        raise ConfigError(f"config.json: 'mlp_only_layers' must be a list of whole numbers; got {layers!r}")
    return layers
