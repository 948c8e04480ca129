"""The text part of checkpoints that also read images or sounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onward.errors import ConfigError, warn_once
from onward.models.blocks import Decoder, DecoderNames
from onward.models.fields import Overlaid, ReadFields, json_object

# What config.json itself may say of the text part; elsewhere it stands in `text_config`.
_SHARED = ("tie_word_embeddings",)


def read_text_part(
    config: Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], Decoder],
    other_fields: Sequence[str],
    unread: Sequence[str],
) -> Decoder:
    """The decoder that `text_config` describes, and one warning that the rest of the model is left out.

    Args:
        config: of the whole checkpoint.
        read: reads the config of a text model.
        other_fields: fields of config.json that speak of the other parts.
        unread: how the names of their weights begin.

    Raises:
        ConfigError: there is no `text_config`, or it has a field that nobody knows.
    """
    (name,) = config["architectures"]
    text = json_object(config, "text_config")
    if not text:
        raise ConfigError(
            f"config.json: {name} wants a 'text_config', which describes the model of its text; it has none"
        )
    for field in (*other_fields, *_SHARED):
        config.get(field)
    fields = ReadFields(text)
    shared = {field: config[field] for field in _SHARED if config.get(field) is not None}
    decoder = read(Overlaid(shared, fields))
    fields.check_unread(f"the text of {name}")
    warn_once(f"{name}: the text part is loaded, and what reads images is left out: prompts are texts alone")
    return replace(
        decoder,
        names=DecoderNames(
            embed_tokens="model.language_model.embed_tokens",
            layers="model.language_model.layers",
            norm="model.language_model.norm",
            layer_embeddings="model.language_model",
        ),
        unread=(*unread, *(name.replace("model.", "model.language_model.", 1) for name in decoder.unread)),
    )
