"""Models: a forward function, its weights and its cache; and the families that Onward has."""

from onward.models.architecture import (
    Architecture,
    Tensors,
    WeightScope,
    architecture_of,
    build_model,
    named_params,
    num_parameters,
    parameter_shapes,
)
from onward.models.families import FAMILIES, read_config
from onward.models.linear import (
    Embedding,
    ExpertLinear,
    LatentLinear,
    Linear,
    Router,
    ShortConv,
    map_marked,
    marked_parts,
    pack_layer,
    pack_params,
    parameter_name,
    stack_params,
)
from onward.models.model import Cache, Forward, Model, NewBlocks, Params
from onward.models.run import Run, check_backend, padded_length, reused_run

__all__ = [
    "FAMILIES", "Architecture", "Cache", "Embedding", "ExpertLinear", "Forward", "LatentLinear", "Linear", "Model",
    "NewBlocks", "Params", "Router", "Run", "ShortConv", "Tensors", "WeightScope", "architecture_of", "build_model",
    "check_backend", "map_marked", "marked_parts", "named_params", "num_parameters", "pack_layer", "pack_params",
    "padded_length", "parameter_name", "parameter_shapes", "read_config", "reused_run", "stack_params",
]  # fmt: skip
