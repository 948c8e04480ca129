"""The files that hold a checkpoint's weights: one, or an index and its shards."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from onward.errors import CheckpointError, one_line
from onward.text_input import read_json_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
METADATA = ".metadata"  # of a torch.distributed.checkpoint
_SHARD = re.compile(r"(?P<stem>.+)-\d+-of-(?P<of>\d+)\.safetensors")
# What a folder may have beside config.json and weights: its tokenizer's files, templates, and how it samples.
TEXT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)


def weight_files(folder: Path) -> list[str]:
    """The files that hold a checkpoint's weights, as paths inside its folder; empty where there are none.

    Where both a single file and an index are there, the single file wins, as in transformers. Shards may have any name:
    the index says which they are. Without either, the only safetensors file is the one, or all shards by their numbers.
    """
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if (folder / INDEX).is_file():
        return list(dict.fromkeys(read_index(folder / INDEX).values()))
    return _unindexed(folder)


def _unindexed(folder: Path) -> list[str]:
    """The only safetensors file of a folder, or those of a whole set of shards; empty for others."""
    if (folder / METADATA).is_file() or (folder / ADAPTER_CONFIG).is_file():
        return []
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(files) == 1 and _SHARD.fullmatch(files[0]) is None:
        return files
    shards = [_SHARD.fullmatch(file) for file in files]
    count = len(files)
    whole = all(shard is not None and int(shard["of"]) == count for shard in shards)
    stems = {shard["stem"] for shard in shards if shard is not None}
    return files if files and whole and len(stems) == 1 else []


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> the shard that holds it, a path inside the index's folder.

    Raises:
        CheckpointError: it is no index, or names a file outside its folder.
    """
    try:
        content = read_json_file(index)
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{index} cannot be read as JSON ({one_line(error)}): download or save it again"
        ) from error
    where = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(
            f"{index} is not an index of shards: it needs an object 'weight_map' from tensor names to file names"
        )
    for file in set(where.values()):
        if lies_outside(file):
            raise CheckpointError(f"{index} names the shard {file!r}, which lies outside its folder")
    return where


def lies_outside(file: str) -> bool:
    """Whether a path in a checkpoint leads out of its folder, or names no file."""
    # The parts of the path decide: resolving it would follow the hub cache's own links out of the folder.
    path = PurePosixPath(file)
    return path.is_absolute() or ".." in path.parts or "\\" in file or "\0" in file or not path.parts


def is_there(path: Path) -> bool:
    """Whether a file that a checkpoint names exists. A name that is too long for any file names none."""
    try:
        return path.is_file()
    except OSError:
        return False


def open_safetensors(path: Path) -> Any:
    """The mapped file, from which tensors are read by name.

    Raises:
        CheckpointError: it is no safetensors file, is cut short, or is too large to map.
    """
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, MemoryError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or cut short ({one_line(error)}): download or save it again"
        ) from error
