"""Models: a forward function, its weights and its cache; and the families that Onward has."""

from onward.models.config import DecoderConfig
from onward.models.decoder import DecoderParams, LayerParams, decoder_model
from onward.models.families import FAMILIES, parameter_shapes, read_config, read_params
from onward.models.model import Cache, Forward, Model, Params
from onward.models.packing import pack_layer, pack_params
from onward.models.run import ModelRun, check_backend, padded_length, reused_run

__all__ = [
    "FAMILIES",
    "Cache",
    "DecoderConfig",
    "DecoderParams",
    "Forward",
    "LayerParams",
    "Model",
    "ModelRun",
    "Params",
    "check_backend",
    "decoder_model",
    "pack_layer",
    "pack_params",
    "padded_length",
    "parameter_shapes",
    "read_config",
    "read_params",
    "reused_run",
]
