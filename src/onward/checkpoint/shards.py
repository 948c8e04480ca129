"""The files that hold a checkpoint's weights: a single file, or an index and its shards."""

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onward.errors import CheckpointError, OnwardError, one_line
from onward.native.machine import file_mappings
from onward.util.text_input import read_json_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
METADATA = ".metadata"  # of a torch.distributed.checkpoint
_SHARD = re.compile(r"(?P<stem>.+)-\d+-of-(?P<of>\d+)\.safetensors")
# Files beside config.json and the weights: the tokenizer's, chat templates, and sampling defaults.
TEXT_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"),
)


def weight_files(folder: Path) -> list[str]:
    """The files that hold a checkpoint's weights, relative to its folder. A single file takes precedence over an index,
    as in transformers; otherwise it is the only safetensors file, or a complete set of numbered shards."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if (folder / INDEX).is_file():
        return list(dict.fromkeys(read_index(folder / INDEX).values()))
    if (folder / METADATA).is_file() or (folder / ADAPTER_CONFIG).is_file():
        return []
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(files) == 1 and _SHARD.fullmatch(files[0]) is None:
        return files
    shards = [_SHARD.fullmatch(file) for file in files]
    complete = all(shard is not None and int(shard["of"]) == len(files) for shard in shards)
    stems = {shard["stem"] for shard in shards if shard is not None}
    return files if complete and len(stems) == 1 else []


def read_object(file: Path, kind: type[OnwardError], what: str = "") -> dict[str, Any]:
    """Read a JSON object from a file, or raise an error of `kind`. what: a prefix for the file in the error."""
    try:
        content = read_json_file(file)
    except (ValueError, OSError) as error:  # ValueError: a NUL in the name
        raise kind(f"{what}{file} cannot be read as JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise kind(f"{what}{file} must be a JSON object; got {type(content).__name__}")
    return content


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> the shard that holds it, a path inside the index's folder."""
    try:
        content = read_json_file(index)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{index} is not JSON: {one_line(error)}: download or save it again") from error
    where = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index} must have an object 'weight_map' from tensor names to file names")
    for file in set(where.values()):
        if lies_outside(file):
            raise CheckpointError(f"{index} lists the shard {file!r}, which is outside its folder")
    return where


def lies_outside(file: str) -> bool:
    """Whether a path in a checkpoint leaves its folder, or is empty."""
    # Decided by the path's parts: resolving it would follow the hub cache's own links out of the folder.
    path = PurePosixPath(file)
    return path.is_absolute() or ".." in path.parts or "\\" in file or "\0" in file or not path.parts


def is_there(path: Path) -> bool:
    """Whether a file that a checkpoint refers to exists; False if the name is too long for any file."""
    try:
        return path.is_file()
    except OSError:
        return False


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, MemoryError, ValueError) as error:
        reason = one_line(error)
        raise CheckpointError(f"{path} is damaged or truncated ({reason}): download or save it again") from error


_MADV_DONTNEED = 4


def page_releaser(folder: Path) -> Callable[[], None]:
    return releaser_of(folder / file for file in weight_files(folder))


def releaser_of(files: Iterable[Path]) -> Callable[[], None]:
    """Return a function that drops this process's resident pages of the files, if they are mapped when it is called.
    Otherwise memory would hold both the mapped file and its packed copy. Linux only; a no-op elsewhere."""
    if sys.platform != "linux":
        return lambda: None
    libc = ctypes.CDLL(None)
    names = {os.fsencode(file.resolve()) for file in files}

    def release() -> None:
        for start, length in file_mappings(names):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED)

    return release


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_float(where: object, name: str, dtype: torch.dtype) -> None:
    """Raise `CheckpointError` for a dtype that the kernels do not support; `where` is the file or folder."""
    if dtype not in _FLOATS:
        raise CheckpointError(f"{where}: tensor {name!r} is {dtype}; convert it to bf16, f16 or f32")


def placed(where: object, name: str, tensor: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """The tensor in `dtype` (None: its own) on `device`, without a copy if possible."""
    if tensor.data_ptr() % tensor.element_size():
        tensor = tensor.clone()  # the file stores it at an address that is not a multiple of its element size
    moved = tensor.to(device=device, dtype=dtype or tensor.dtype)
    narrowed = moved.dtype == torch.float16 and tensor.dtype != torch.float16
    if narrowed and moved.isinf().any() and not tensor.isinf().any():
        raise CheckpointError(
            f"{where}: tensor {name!r} has values up to {tensor.abs().max().item():.3g}, above float16's maximum of "
            "65504: load it as bfloat16 or float32"
        )
    return moved
