"""Read a checkpoint into its transformers module. The weights stay memory-mapped."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.formats import methods_of
from onward.checkpoint.safetensors import SafetensorsFolder
from onward.errors import CheckpointError, ConfigError, UnsupportedArchitectureError, one_line
from onward.models.transformers import library

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
