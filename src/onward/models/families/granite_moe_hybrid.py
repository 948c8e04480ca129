"""Granite 4: Mamba2 (arXiv 2405.21060) in most layers, attention without positions in the others; experts, or dense."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder, LayerNames
from onward.models.blocks.layer import Mixer, TokenBlock
from onward.models.config import common_fields, only
from onward.models.families.granite import granite_attention, granite_decoder
from onward.models.families.granite_moe import granite_experts, shared_block
from onward.models.fields import Overlaid
from onward.models.mamba_fields import FULL, LINEAR, hybrid_types, mamba_block

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    fields = common_fields(Overlaid(config, {"intermediate_size": 1}))  # of experts, which a dense model has not
    only(config, "position_embedding_type", "rope", "nope")
    only(config, "normalization_function", "rmsnorm")
    config.get("init_method")
    shared: TokenBlock = shared_block(config, fields)
    dense = config.get("num_local_experts") == 0
    if dense:
        config.get("num_experts_per_tok")
    block = shared if dense else granite_experts(config, fields, shared_block(config, fields))
    turns = config.get("position_embedding_type") == "rope"
    types = hybrid_types(config, "layer_types", fields.num_layers, default=[LINEAR] * fields.num_layers)
    mixers: dict[str, Mixer] = {FULL: granite_attention(config, fields, rope=fields.rope if turns else None)}
    if LINEAR in types:
        mixers[LINEAR] = mamba_block(config, fields)
    for name in (name for name in config if name.startswith(("mamba_", "time_step_"))):
        config.get(name)  # which files have without such layers too
    names = {
        kind: LayerNames(mixer="self_attn" if kind == FULL else "mamba", feed_forward="shared_mlp" if dense else "")
        for kind in mixers
    }
    return granite_decoder(config, fields, ((mixers[kind], block, {"names": names[kind]}) for kind in types))
