"""A head of its own in a checkpoint whose config.json ties it to the embedding, as merged fine-tunes have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from onward.checkpoint.safetensors_folder import SafetensorsFolder
from onward.checkpoint.shards import weight_files
from onward.checkpoint.stored_names import names_of
from onward.errors import OnwardError, warn
from onward.models import read_config


def with_own_head(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, untied where the safetensors hold an embedding and another head, as transformers loads them.

    Errors in the config or the weights are left to their readers.
    """
    try:
        if not weight_files(folder) or not _is_own(folder, config):
            return dict(config)
        own = {**config, "tie_word_embeddings": False}
        if read_config(own).tie_word_embeddings:
            return dict(config)
    except OnwardError:
        return dict(config)
    warn(
        f"{folder}: config.json ties the head to the embedding, but the weights hold both and they differ: they are "
        "not tied (set tie_word_embeddings to false to say so)"
    )
    return own


def _is_own(folder: Path, config: Mapping[str, Any]) -> bool:
    architecture = read_config(config)
    names = names_of(architecture)
    if names is None or not architecture.tie_word_embeddings:
        return False
    stored = SafetensorsFolder(folder, None, torch.device("cpu"), config=architecture)
    pair = [stored.find(f"{name}.weight") for name in (names.embed_tokens, names.lm_head)]
    embedding, head = pair
    if embedding is None or head is None or embedding.shape != head.shape:
        return False
    return not torch.equal(embedding, head)
