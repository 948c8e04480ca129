"""The draft head that `load(…, draft=)` names, and its weights."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard, cast

from onward.checkpoint import Checkpoint, CheckpointFolder, find_folder, open_checkpoint
from onward.checkpoint.weights import read_head
from onward.decoding.speculation import LOOKUPS
from onward.errors import RequestError, UnsupportedArchitectureError
from onward.models import Architecture, Model, pack_layer
from onward.models.heads import DraftHead, HeadParams, head_reader, read_mtp
from onward.quantization import quantize_params


def is_draft_source(draft: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether `draft=` names a checkpoint, of a head or of a smaller model."""
    return isinstance(draft, os.PathLike) or (isinstance(draft, str) and draft not in LOOKUPS)


def refuse_head(config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedArchitectureError` for a head in place of a model."""
    if head_reader(config) is not None:
        raise UnsupportedArchitectureError("this is a draft head, not a model: load its model with it as draft=")


def find_head(draft: Any, folder: Checkpoint, config: Architecture | None, show: bool) -> tuple[DraftHead, Path] | None:
    """The head that `draft` names, and the folder with its weights; None for another drafter."""
    if not is_draft_source(draft):
        return None
    if draft == "mtp":
        if not isinstance(folder, CheckpointFolder):
            raise RequestError(f"draft='mtp' needs a folder of safetensors, and {folder.path} is not one")
        return read_mtp(config), folder.path
    source = open_checkpoint(find_folder(draft, progress=show))
    read = head_reader(source.config) if isinstance(source, CheckpointFolder) else None
    return None if read is None else (read(source.config, config), source.path)


def read_draft_head(head: DraftHead, folder: Path, model: Model, format: str | None) -> HeadParams:
    """The weights of a head in the dtype of its model, quantized as the model is, or packed on a CPU."""
    params = read_head(folder, head, model.params.norm.dtype, model.device)
    if format is not None:
        return cast(HeadParams, quantize_params(params, format)[0])
    return cast(HeadParams, pack_layer(params) if model.device.type == "cpu" else params)
