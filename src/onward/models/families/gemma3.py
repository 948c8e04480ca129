"""Gemma 3 (arXiv 2503.19786): Gemma 2 with norms of heads instead of caps, and layers with a window that turn faster.

Of multimodal checkpoints the text part is loaded.
"""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import (
    common_fields,
    every_nth_full,
    layer_types,
    layer_windows,
    ropes_by_type,
    sliding_window,
)
from onward.models.families.gemma2 import ACTIVATION, DEFAULTS, gemma_ends, gemma_layer
from onward.models.fields import Overlaid, flag, positive_int, positive_number, softcap
from onward.models.multimodal import read_text_part
from onward.models.rope import rotary_schedule

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

_DEFAULTS = DEFAULTS | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
_OF_IMAGES = (
    *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    *("boi_token_id", "eoi_token_id", "image_token_id"),
)


def read_config(config: Mapping[str, Any]) -> Decoder:
    if config["architectures"] == ["Gemma3ForConditionalGeneration"]:
        return read_text_part(config, _read_text, _OF_IMAGES, ("model.vision_tower.", "model.multi_modal_projector."))
    return _read_text(config)


def _read_text(config: Mapping[str, Any]) -> Decoder:
    ropes = ropes_by_type(config)
    full = {"rope_parameters": ropes.get("full_attention", {})}
    config = Overlaid(full, config, _DEFAULTS)
    fields = common_fields(config, **ACTIVATION, default_base=1e6)
    sliding = {"rope_theta": config.get("rope_local_base_freq"), "rope_parameters": ropes.get("sliding_attention")}
    local = rotary_schedule(sliding, fields.head_dim, fields.max_position_embeddings, base=1e4)
    bias = flag(config, "attention_bias")
    norm = fields.norm(fields.head_dim, offset=1.0)
    scale = positive_number(config, "query_pre_attn_scalar") ** -0.5
    pattern = every_nth_full(positive_int(config, "sliding_window_pattern", 6), fields.num_layers)
    windows = layer_windows(layer_types(config, pattern), sliding_window(config))
    return fields.decoder(
        (
            gemma_layer(
                fields,
                fields.attention(
                    rope=fields.rope if window is None else local,
                    window=window,
                    scale=scale,
                    qkv_bias=bias,
                    o_bias=bias,
                    q_norm=norm,
                    k_norm=norm,
                ),
                fields.feed_forward(),
            )
            for window in windows
        ),
        **gemma_ends(fields, softcap(config, "final_logit_softcapping")),
    )
