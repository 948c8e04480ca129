"""Qwen3.5 and 3.6, the dense models: Qwen3-Next's layers with the projections of Gated DeltaNet apart.

Checkpoints come with a vision tower and layers that predict several tokens. The text model is what is read; their
tensors (`model.visual.*`, `mtp.*`) are not.
"""

from collections.abc import Mapping
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Decoder, DecoderNames
from onward.models.families.qwen3_next import hybrid_decoder
from onward.models.fields import ReadFields

ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")

_WITH_VISION = DecoderNames(
    "model.language_model.embed_tokens", "model.language_model.layers", "model.language_model.norm"
)
# Of images and videos, of the tokens that stand for them, and of layers that predict several tokens.
_NOT_TEXT = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "attn_output_gate", "mamba_ssm_dtype"),
)


def read_config(config: Mapping[str, Any]) -> Decoder:
    for name in _NOT_TEXT:
        config.get(name)
    text = config.get("text_config")
    if text is None:
        return _text_decoder(config, unread=("mtp.",))
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config must be an object; got {text!r}")
    fields = ReadFields({"tie_word_embeddings": config.get("tie_word_embeddings"), **text})
    decoder = _text_decoder(fields, names=_WITH_VISION, unread=("model.visual.", "mtp."))
    fields.check_unread(f"the text model of {ARCHITECTURES[1]}")
    return decoder


def _text_decoder(config: Mapping[str, Any], **changes: Any) -> Decoder:
    if config.get("attn_output_gate") is False:
        raise ConfigError("config.json: attn_output_gate must be true in this family; got false")
    for name in _NOT_TEXT:
        config.get(name)
    return hybrid_decoder(config, fused=False, **changes)
