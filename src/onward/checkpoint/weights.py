"""Read the weights of a model from a folder: safetensors, mapped, or a torch.distributed.checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.dcp import DcpFolder, NameMapSource, is_distributed
from onward.checkpoint.mapped_tensors import MappedSafetensors, MappedTensors
from onward.checkpoint.name_map import NameMap
from onward.checkpoint.safetensors import SafetensorsFolder
from onward.checkpoint.stored_names import is_buffer
from onward.errors import CheckpointError
from onward.models import Architecture, WeightScope
from onward.models.architecture import is_unread
from onward.ops import QuantizedWeight


def read_weights(
    folder: Path,
    config: Architecture,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    name_map: NameMapSource = None,
    each_layer: Callable[[Any], Any] = lambda layer: layer,
    keeps_bits: bool = False,
    own_dtypes: bool = False,
    show_in_floats: Callable[[list[str]], None] = lambda modules: None,
) -> Any:
    """All weights of a model. Every tensor of the folder must be one of them.

    Args:
        dtype: to convert to; None keeps that of the tensor which is taken first, for all tensors.
        name_map: from the names in the files to Hugging Face's (`onward.checkpoint.name_map`).
        each_layer: converts each layer (packs it, say) as soon as it is read.
        keeps_bits: give matrices in few bits that the kernels multiply with as they are as `QuantizedWeight`.
        own_dtypes: without a dtype, safetensors keep each its own.
        show_in_floats: is called with the modules whose quantized weights became floats.

    Raises:
        CheckpointError: a tensor is missing, mis-shaped or damaged, or is none of the architecture's weights.
        RequestError: there is a name map, and the weights are quantized.
    """
    tensors: SafetensorsFolder | MappedTensors
    if is_distributed(folder):
        tensors = DcpFolder(folder, config, dtype, device, name_map)
    elif name_map is not None:
        tensors = MappedSafetensors(folder, config, dtype, device, NameMap.of(name_map, folder))
    else:
        tensors = SafetensorsFolder(folder, dtype, device, keeps_bits=keeps_bits, own_dtypes=own_dtypes, config=config)
    params = config.read(WeightScope(tensors), each_layer)
    _check_left(folder, config, tensors, params)
    if isinstance(tensors, SafetensorsFolder):
        show_in_floats(tensors.in_floats)
    return params


def _check_left(folder: Path, config: Architecture, tensors: SafetensorsFolder | MappedTensors, params: Any) -> None:
    """Raise if a tensor was not taken: config.json and the weights are then of different models."""
    left = [name for name in tensors.left() if not (is_buffer(name) or is_unread(config, name))]
    if left == ["lm_head.weight"]:
        embedding = params.embed_tokens.weight
        embedding = embedding.dequantize() if isinstance(embedding, QuantizedWeight) else embedding
        assert isinstance(embedding, Tensor), "stock weights are read as they are"
        head = tensors.take("lm_head.weight", tuple(embedding.shape))
        assert isinstance(head, Tensor)
        if not torch.equal(head, embedding):
            raise CheckpointError(
                f"{folder}: config.json ties the head to the embedding, but lm_head.weight differs from it: "
                "set tie_word_embeddings to false, or remove the tensor"
            )
    elif left:
        advice = ": is it the config of this checkpoint?"
        if isinstance(tensors, MappedTensors):
            advice = (
                ": leave training state out by the name map, as in "
                f"{json.dumps({left[0]: None})}, or is config.json of another checkpoint?{tensors.proposal()}"
            )
        raise CheckpointError(
            f"{folder}: the weights hold {len(left)} tensors that config.json leaves no place for, "
            f"{left[0]!r} for one{advice}"
        )
