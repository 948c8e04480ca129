"""Families as forwards: a function, its weights and its cache."""

from onward.models.config import DecoderConfig
from onward.models.decoder import DecoderParams, decoder_model
from onward.models.families import FAMILIES, read_config, read_params
from onward.models.model import Cache, Forward, Model, Params
from onward.models.packing import pack_params

__all__ = [
    "FAMILIES",
    "Cache",
    "DecoderConfig",
    "DecoderParams",
    "Forward",
    "Model",
    "Params",
    "decoder_model",
    "pack_params",
    "read_config",
    "read_params",
]
