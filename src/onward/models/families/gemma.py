"""Gemma 2 (arXiv 2408.00118): four norms per layer, a window in every other layer, soft caps on scores and logits.
Gemma 3 (arXiv 2503.19786): norms of heads instead of caps, and a smaller RoPE base in layers with a window.

Only the text part of multimodal checkpoints is loaded.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from onward.models.blocks import Attention, Decoder, DecoderLayer, LayerNames
from onward.models.config import (
    CommonFields,
    attention_biases,
    common_fields,
    every_nth_full,
    layer_windows,
    read_text_part,
    ropes_by_type,
    sliding_window,
)
from onward.models.fields import Config, FieldOverlay, positive_int, positive_number, softcap, words
from onward.models.rope import rotary_schedule

# The defaults of fields, which most files on the hub omit.
DEFAULTS = {
    "vocab_size": 256_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}
_DEFAULTS_3 = DEFAULTS | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
ACTIVATION: dict[str, Any] = {
    "activation_field": "hidden_activation",
    "activations": ("gelu_pytorch_tanh", "gelu", "silu"),
}
NAMES = LayerNames(
    mixer_post_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_post_norm="post_feedforward_layernorm",
)
_IMAGES = words("""
    vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id
    image_token_id
""")


def _read_gemma2(config: Config) -> Decoder:
    config = FieldOverlay(config, DEFAULTS)
    fields = common_fields(config, **ACTIVATION)
    attention = fields.attention(softcap=softcap(config, "attn_logit_softcapping", 50.0))
    windows = layer_windows(config, every_nth_full(2, fields.num_layers), sliding_window(config))
    cap = softcap(config, "final_logit_softcapping", 30.0)
    return _decoder(config, fields, (replace(attention, window=window) for window in windows), cap)


def _read_gemma3(config: Config) -> Decoder:
    ropes = ropes_by_type(config)
    full = {"rope_parameters": ropes.get("full_attention", {})}
    config = FieldOverlay(full, config, _DEFAULTS_3)
    fields = common_fields(config, **ACTIVATION, base=1e6)
    sliding = {"rope_theta": config.get("rope_local_base_freq"), "rope_parameters": ropes.get("sliding_attention")}
    local = rotary_schedule(sliding, fields.head_dim, fields.max_position_embeddings, base=1e4)
    norm = fields.norm(fields.head_dim, offset=1.0)
    attention = fields.attention(q_norm=norm, k_norm=norm)
    pattern = every_nth_full(positive_int(config, "sliding_window_pattern", 6), fields.num_layers)
    windows = layer_windows(config, pattern, sliding_window(config))
    attentions = (replace(attention, window=own, rope=fields.rope if own is None else local) for own in windows)
    return _decoder(config, fields, attentions, softcap(config, "final_logit_softcapping"))


def _decoder(config: Config, fields: CommonFields, attentions: Iterable[Attention], cap: float | None) -> Decoder:
    """Norms before and after each block, with weights added to 1. cap: of the logits."""
    norm, scale = fields.norm(offset=1.0), positive_number(config, "query_pre_attn_scalar") ** -0.5
    mixers = (replace(attention, **attention_biases(config), scale=scale) for attention in attentions)
    return fields.decoder(
        (DecoderLayer(mixer, fields.feed_forward(), norm, norm, norm, norm, names=NAMES) for mixer in mixers),
        norm=norm,
        embedding_multiplier=fields.hidden_size**0.5,
        rounds_multiplier=True,
        logits_softcap=cap,
    )


ARCHITECTURES = {
    "Gemma2ForCausalLM": _read_gemma2,
    "Gemma3ForCausalLM": _read_gemma3,
    "Gemma3ForConditionalGeneration": partial(read_text_part, read=_read_gemma3, other_fields=_IMAGES),
}
