"""The text part of Mistral's models that read images: Mistral Small 3.1 and later, Ministral 3, Mistral Small 4."""

from collections.abc import Mapping
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Decoder
from onward.models.families import ministral, mistral, mistral4
from onward.models.fields import Overlaid
from onward.models.multimodal import read_text_part

ARCHITECTURES = ("Mistral3ForConditionalGeneration",)

# model_type of the text part -> its architecture, and what reads it.
_TEXTS = {
    "mistral": ("MistralForCausalLM", mistral.read_config),
    "ministral3": ("Ministral3ForCausalLM", ministral.read_config),
    "mistral4": ("Mistral4ForCausalLM", mistral4.read_config),
}
_OF_IMAGES = (
    *("vision_config", "image_token_index", "image_token_id", "projector_hidden_act", "vision_feature_layer"),
    *("multimodal_projector_bias", "spatial_merge_size"),
)


def read_config(config: Mapping[str, Any]) -> Decoder:
    return read_text_part(config, _read_text, _OF_IMAGES, ("model.vision_tower.", "model.multi_modal_projector."))


def _read_text(config: Mapping[str, Any]) -> Decoder:
    kind = config.get("model_type", "mistral")
    if kind not in _TEXTS:
        raise ConfigError(
            f"config.json: model_type of text_config must be one of {', '.join(map(repr, _TEXTS))}; got {kind!r}"
        )
    architecture, read = _TEXTS[kind]
    return read(Overlaid({"architectures": [architecture]}, config))
