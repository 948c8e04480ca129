"""Read a model's weights from a folder: memory-mapped safetensors, or a torch.distributed.checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.dcp import DcpFolder, NameMapSource, is_distributed
from onward.checkpoint.mapped_tensors import MappedTensors, mapped_safetensors
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
    """Read all weights of a model. Every tensor of the folder must belong to it.

    Args:
        dtype: to convert to; None uses the dtype of the first tensor read for all tensors.
        name_map: from the names in the files to Hugging Face's (`onward.checkpoint.name_map`).
        each_layer: converts each layer (packs it, say) as soon as it is read.
        keeps_bits: return quantized matrices that the kernels support as `QuantizedWeight`.
        own_dtypes: without a dtype, each tensor of a safetensors file keeps its own.
        show_in_floats: called with the modules whose quantized weights were dequantized.

    Raises:
        CheckpointError: a tensor is missing, damaged, of the wrong shape, or not part of the architecture.
        RequestError: there is a name map, and the weights are quantized.
    """
    tensors: SafetensorsFolder | MappedTensors
    if is_distributed(folder):
        tensors = DcpFolder(folder, config, dtype, device, name_map)
    elif name_map is not None:
        tensors = mapped_safetensors(folder, config, dtype, device, NameMap.of(name_map, folder))
    else:
        tensors = SafetensorsFolder(folder, dtype, device, keeps_bits=keeps_bits, own_dtypes=own_dtypes, config=config)
    params = config.read(WeightScope(tensors), each_layer)
    _check_all_read(folder, config, tensors, params)
    if isinstance(tensors, SafetensorsFolder):
        show_in_floats(tensors.in_floats)
    return params


def _check_all_read(
    folder: Path, config: Architecture, tensors: SafetensorsFolder | MappedTensors, params: Any
) -> None:
    """Raise if a tensor was not read: config.json and the weights are then from different models."""
    left = [name for name in tensors.unread() if not (is_buffer(name) or is_unread(config, name))]
    if left == ["lm_head.weight"]:
        embedding = params.embed_tokens.weight
        embedding = embedding.dequantize() if isinstance(embedding, QuantizedWeight) else embedding
        assert isinstance(embedding, Tensor), "stock weights are tensors"
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
                f": exclude training state with the name map, for example {json.dumps({left[0]: None})}, or is "
                f"config.json from another checkpoint?{tensors.proposal()}"
            )
        raise CheckpointError(
            f"{folder}: the weights hold {len(left)} tensors that config.json does not describe, such as "
            f"{left[0]!r}{advice}"
        )
