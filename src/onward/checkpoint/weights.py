"""Read a model's weights from a folder of memory-mapped safetensors or of torch.distributed.checkpoint: into params, or
into their transformers module."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.dcp import DcpFolder, NameMapSource, is_distributed
from onward.checkpoint.formats import methods_of
from onward.checkpoint.name_map import MappedTensors, NameMap
from onward.checkpoint.quantized_folder import Manifest, QuantizedTensors, read_manifest, weights_by_stock_name
from onward.checkpoint.safetensors import SafetensorsFolder
from onward.checkpoint.stored_names import is_buffer
from onward.errors import CheckpointError, ConfigError, RequestError, UnsupportedArchitectureError, one_line
from onward.models import Architecture, WeightScope
from onward.models.architecture import is_unread
from onward.models.heads import DraftHead, HeadParams
from onward.models.linear import float_weight
from onward.models.transformers import library


def read_weights(
    folder: Path,
    config: Architecture,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    manifest: Manifest | None = None,
    mapped: bool = True,
    name_map: NameMapSource = None,
    each_layer: Callable[[Any], Any] = lambda layer: layer,
    keeps_bits: bool = False,
    own_dtypes: bool = False,
    show_in_floats: Callable[[list[str]], None] = lambda modules: None,
) -> Any:
    """Read all weights of a model. Every tensor of the folder must belong to it.

    Args:
        dtype: to convert to; None uses the dtype of the first tensor read for all tensors.
        manifest: of a folder that Onward wrote, whose matrices stay in the mapped file if `mapped`.
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
    if manifest is not None:
        tensors = QuantizedTensors(folder, manifest, dtype, device, config, mapped=mapped)
    elif is_distributed(folder):
        tensors = DcpFolder(folder, config, dtype, device, name_map)
    elif name_map is not None:
        files = SafetensorsFolder(folder, dtype, device)
        if files.methods is not None:
            quantized = f"config.json of {folder} describes quantized ones"
            raise RequestError(f"a name map requires float weights, but {quantized}")
        tensors = MappedTensors(folder, config, dtype, device, files.named(), NameMap.of(name_map, folder))
    else:
        tensors = SafetensorsFolder(folder, dtype, device, keeps_bits=keeps_bits, own_dtypes=own_dtypes, config=config)
    params = config.read(WeightScope(tensors), each_layer)
    _check_all_read(folder, config, tensors, params)
    if isinstance(tensors, SafetensorsFolder):
        show_in_floats(tensors.in_floats)
    return params


def read_parameters(
    folder: CheckpointFolder, config: Architecture, name_map: NameMapSource = None
) -> tuple[dict[str, Parameter], torch.dtype]:
    """The weights of a model as float32 parameters by stock name, and the dtype that the checkpoint has them in."""
    weights, dtype = read_by_stock_name(folder, config, name_map)
    return {name: Parameter(weight.to(torch.float32, copy=True)) for name, weight in weights.items()}, dtype


def read_by_stock_name(
    folder: CheckpointFolder, config: Architecture, name_map: NameMapSource = None
) -> tuple[dict[str, torch.Tensor], torch.dtype]:
    """The weights of a model by stock name, mapped from their files, and the dtype of its embedding. Raises
    `RequestError`: they are quantized."""
    if methods_of(folder.config) is not None or read_manifest(folder.path, folder.config) is not None:
        raise RequestError(f"the weights of {folder.path} are quantized, and weights in floats are needed")
    params = read_weights(
        folder.path, config, dtype=None, device=torch.device("cpu"), name_map=name_map, own_dtypes=True
    )
    weights = {}
    for name, weight in weights_by_stock_name(config, params).items():
        assert isinstance(weight, torch.Tensor), "they are not quantized"
        weights[name] = weight
    return weights, params.embed_tokens.weight.dtype


# Tensors of draft heads that say nothing new: which ids a head has, and the embedding of its target.
_OF_HEADS = {"d2t", "t2d", "embed_tokens.weight"}


def read_head(folder: Path, head: DraftHead, dtype: torch.dtype, device: torch.device) -> HeadParams:
    """The weights of a draft head, from a folder of its own or from that of its target.

    Raises:
        CheckpointError: as `read_weights`.
    """
    config = head.target
    if head.has_own_folder:  # a tied embedding is not stored there
        config = replace(config, tie_word_embeddings=False)
    tensors = SafetensorsFolder(folder, dtype, device, config=config)
    params = head.read(WeightScope(tensors), tensors.find)
    if head.has_own_folder and (left := sorted({*tensors.unread()} - _OF_HEADS)):
        raise CheckpointError(f"{folder}: its config.json does not describe {len(left)} tensors, such as {left[0]!r}")
    return params if params.ids is None else params._replace(ids=params.ids.to(device))


def _check_all_read(
    folder: Path, config: Architecture, tensors: SafetensorsFolder | MappedTensors, params: Any
) -> None:
    """Raise if a tensor was not read: config.json and the weights are then from different models."""
    # A classifier's head is not part of the decoder: `CheckpointFolder.embedding_format` has it.
    left = [x for x in tensors.unread() if not (is_buffer(x) or is_unread(config, x) or x == "score.weight")]
    if left == ["lm_head.weight"]:
        embedding = params.embed_tokens.weight
        head = tensors.take("lm_head.weight", tuple(embedding.shape))
        head, embedding = map(float_weight, (head, embedding))
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


# Entries of transformers' loading report, and the errors for them.
_REPORTS = (
    ("missing_keys", "the weights lack {count} tensors of the model"),
    ("unexpected_keys", "the weights hold {count} tensors that the model does not use"),
    ("mismatched_keys", "the shapes of {count} tensors do not match config.json"),
)


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the installed transformers has the causal language model of this config.json."""
    names = library("models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = names.get(config.get("model_type"))
    return name is not None and (config.get("architectures") or [name]) == [name]


def read_module(folder: CheckpointFolder, dtype: torch.dtype | None, device: torch.device) -> Any:
    """The transformers model of config.json with the folder's weights. transformers renames the tensors itself, and
    copies those that its layout merges (experts). dtype: None keeps the checkpoint's."""
    transformers = library()
    if not is_known(folder.config):
        raise UnsupportedArchitectureError(
            f"transformers {transformers.__version__} has no causal language model for architectures "
            f"{folder.config.get('architectures')} and model_type {folder.config.get('model_type')!r} in config.json"
        )
    if methods_of(folder.config) is not None:
        raise ConfigError(f"{folder.path}: quantized weights cannot be read for models that run through transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{folder.path}: transformers cannot read config.json: {one_line(error)}") from error
    classes = library("models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING
    tensors = SafetensorsFolder(folder.path, dtype, device).all()
    if dtype is None:
        dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    with _quiet():
        module, report = classes[type(config)].from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
        )
    for kind, message in _REPORTS:
        if names := sorted(map(str, report[kind])):
            raise CheckpointError(f"{folder.path}: {message.format(count=len(names))}, such as {names[0]}")
    return module.to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and reports: errors are raised here instead."""
    logging = library("utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
