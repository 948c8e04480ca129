"""Qwen3.5 and 3.6: Qwen3-Next's layers with the projections of Gated DeltaNet apart; dense, or with experts.

Checkpoints come with a vision tower and layers that predict several tokens. The text model is what is read; their
tensors (`model.visual.*`, `mtp.*`) are not.
"""

from collections.abc import Mapping
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Decoder
from onward.models.blocks.layer import TokenBlock
from onward.models.families.qwen3_next import gated_experts, hybrid_decoder, hybrid_fields
from onward.models.fields import Overlaid
from onward.models.multimodal import read_text_part

_DENSE, _SPARSE = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
_WITH_VISION = {"Qwen3_5ForConditionalGeneration": _DENSE, "Qwen3_5MoeForConditionalGeneration": _SPARSE}
ARCHITECTURES = (_DENSE, _SPARSE, *_WITH_VISION)

_OF_VISION = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
# What some files say and no forward of this family asks, for it is always so.
_ALWAYS = {"attn_output_gate": True, "norm_topk_prob": True, "decoder_sparse_step": 1}
# Of layers that predict several tokens, and of states, which are float32.
_NO_SAY = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")


def read_config(config: Mapping[str, Any]) -> Decoder:
    (name,) = config["architectures"]
    if name not in _WITH_VISION:
        return _read_text(config, name)
    for field in _NO_SAY:
        config.get(field)
    return read_text_part(
        config, lambda text: _read_text(text, _WITH_VISION[name]), _OF_VISION, ("model.visual.", "mtp.")
    )


def _read_text(config: Mapping[str, Any], name: str) -> Decoder:
    for field, value in _ALWAYS.items():
        if config.get(field) not in (None, value):
            raise ConfigError(f"config.json: {field} must be {value!r} in this family; got {config[field]!r}")
    for field in (*_OF_VISION, *_NO_SAY):
        config.get(field)
    if name == _DENSE:
        fields = hybrid_fields(config)
        block: TokenBlock = fields.feed_forward()
    else:
        # No layer is dense, so files leave the size of a dense block out.
        fields = hybrid_fields(Overlaid(config, {"intermediate_size": 1}))
        block = gated_experts(config, fields, default_count=256, default_chosen=8, normalize=True)
    return hybrid_decoder(config, fields, [block] * fields.num_layers, fused=False, unread=("mtp.",))
