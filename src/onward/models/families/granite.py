"""Granite 3 (arXiv 2405.04324): Llama with factors on embedding, residual branches, scores and logits; optionally with
experts, and in newer models a dense block beside them. Granite 4: Mamba2 (arXiv 2405.21060) in most layers."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from onward.models.blocks import Attention, Decoder, ExpertNames, Experts, FeedForward, FeedForwardNames, LayerNames
from onward.models.blocks.layer import Mixer, TokenBlock
from onward.models.config import CommonFields, attention_biases, common_fields, ignore, only
from onward.models.family_fields import FULL, LINEAR, hybrid_types, mamba_block, routed_experts
from onward.models.fields import Config, FieldOverlay, flag, positive_int, positive_number


def _read_granite(config: Config) -> Decoder:
    fields = common_fields(config)
    block = fields.feed_forward(bias=flag(config, "mlp_bias"))
    return _decoder(config, fields, [(_attention(config, fields), block, LayerNames())] * fields.num_layers)


def _read_moe(config: Config, *, has_shared: bool = False) -> Decoder:
    """Experts weighted by the softmax of the chosen ones."""
    fields = common_fields(config)
    has_shared = has_shared and bool(config.get("shared_intermediate_size"))
    experts = _experts(config, fields, _shared_block(config, fields) if has_shared else None)
    layer = _attention(config, fields), experts, LayerNames(feed_forward="")
    return _decoder(config, fields, [layer] * fields.num_layers)


def _read_hybrid(config: Config) -> Decoder:
    """Mamba2 in most layers, attention without RoPE in the others; experts, or dense."""
    fields = common_fields(FieldOverlay(config, {"intermediate_size": 1}))  # of experts; absent in dense models
    only(config, position_embedding_type=("rope", "nope"), normalization_function="rmsnorm")
    dense = config.get("num_local_experts") == 0
    ignore(config, "init_method", *(["num_experts_per_tok"] if dense else []))
    shared = _shared_block(config, fields)
    block = shared if dense else _experts(config, fields, shared)
    types = hybrid_types(config, "layer_types", fields.num_layers, default=[LINEAR] * fields.num_layers)
    rope = fields.rope if config.get("position_embedding_type") == "rope" else None
    mixers: dict[str, Mixer] = {FULL: _attention(config, fields, rope=rope)}
    if LINEAR in types:
        mixers[LINEAR] = mamba_block(config, fields)
    # Files have these even without such layers.
    ignore(config, *(name for name in config if name.startswith(("mamba_", "time_step_"))))
    names = {
        kind: LayerNames(mixer="self_attn" if kind == FULL else "mamba", feed_forward="shared_mlp" if dense else "")
        for kind in mixers
    }
    return _decoder(config, fields, ((mixers[kind], block, names[kind]) for kind in types))


def _attention(config: Config, fields: CommonFields, **changes: Any) -> Attention:
    scale = positive_number(config, "attention_multiplier", 1.0)
    return fields.attention(**attention_biases(config), scale=scale, **changes)


def _shared_block(config: Config, fields: CommonFields) -> FeedForward:
    return fields.feed_forward(
        intermediate_size=positive_int(config, "shared_intermediate_size", 1024),
        fused=True,
        names=FeedForwardNames(gate_up_proj="input_linear", down_proj="output_linear"),
    )


def _experts(config: Config, fields: CommonFields, shared: FeedForward | None) -> Experts:
    names = ExpertNames("block_sparse_moe.router.layer", experts="block_sparse_moe.experts", shared="shared_mlp")
    count = positive_int(config, "num_local_experts", 8)
    return routed_experts(config, fields, count, 2, score="softmax_of_chosen", shared=shared, names=names)


def _decoder(config: Config, fields: CommonFields, layers: Iterable[tuple[Mixer, TokenBlock, LayerNames]]) -> Decoder:
    multiplier = positive_number(config, "residual_multiplier", 1.0)
    return fields.decoder(
        (fields.layer(mixer, block, residual_multiplier=multiplier, names=names) for mixer, block, names in layers),
        embedding_multiplier=positive_number(config, "embedding_multiplier", 1.0),
        logits_multiplier=1 / positive_number(config, "logits_scaling", 1.0),
    )


ARCHITECTURES = {
    "GraniteForCausalLM": _read_granite,
    "GraniteMoeForCausalLM": _read_moe,
    "GraniteMoeHybridForCausalLM": _read_hybrid,
    "GraniteMoeSharedForCausalLM": partial(_read_moe, has_shared=True),
}
