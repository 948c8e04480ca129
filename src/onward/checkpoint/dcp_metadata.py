"""The `.metadata` of a torch.distributed.checkpoint folder: which bytes of which file hold which part of a tensor.

It is a pickle, and a pickle is a program. It is run by an unpickler that admits the names a checkpoint needs and no
others; and what those stand for is not PyTorch's classes but records without behaviour, so that nothing but data can
come out of it. Every value is then checked.
"""

import io
import math
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onward.checkpoint.shards import lies_outside
from onward.errors import CheckpointError, one_line

METADATA = ".metadata"


class StoredChunk(NamedTuple):
    """A box of a tensor and where it is: `length` bytes from `start` on in `file`, as torch.save wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor in chunks that cover it, each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by their dotted names. What is no tensor (a step, a schedule) is left out.

    Raises:
        CheckpointError: a class that a checkpoint does not need, damage, or values that contradict each other.
    """
    file = folder / METADATA
    try:
        root = _Unpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a stranger's program may raise
        raise CheckpointError(f"{file} cannot be read ({one_line(error)}): save the checkpoint again") from error
    try:
        fields = root.fields("Metadata")
        where = dict(_storage(*item) for item in fields["storage_data"].items())
        return {
            _text(name): _stored_tensor(name, entry.fields("TensorStorageMetadata"), where)
            for name, entry in fields["state_dict_metadata"].items()
            if entry.kind != "BytesStorageMetadata"
        }
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not the metadata of a torch.distributed.checkpoint folder ({type(error).__name__}: "
            f"{one_line(error)})"
        ) from error


# ── the unpickler ─────────────────────────────────────────────────────────────────────────────────────────────


class _Record:
    """What an instance of an admitted class becomes: its state, and no behaviour."""

    kind = ""
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self, kind: str) -> dict[str, Any]:
        if self.kind != kind or not isinstance(self.state, dict):
            raise TypeError(f"a {kind} was expected; got a {self.kind}")
        return self.state


# PyTorch before 2.3 kept the tensors' properties elsewhere; what is admitted of a path is its words.
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
}
_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    **{("builtins", kind.__name__): kind for kind in (dict, frozenset, list, set, tuple)},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Path) -> None:
        super().__init__(io.BytesIO(file.read_bytes()))
        self._file = file

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _RECORDS.get(module_name, ()):
            return type(global_name, (_Record,), {"kind": global_name})
        if (module_name, global_name) in _PLAIN:
            return _PLAIN[module_name, global_name]
        raise CheckpointError(
            f"{self._file} is a pickle that wants {module_name}.{global_name}, which no checkpoint of tensors needs: "
            "it was not run. Read it only with the program that wrote it, if you trust where it is from"
        )


# ── records to checked values ─────────────────────────────────────────────────────────────────────────────────


class _Bytes(NamedTuple):
    file: str
    start: int
    length: int


def _storage(index: _Record, info: _Record) -> tuple[tuple[str, tuple[int, ...] | None], _Bytes]:
    key, place = index.fields("MetadataIndex"), info.fields("_StorageInfo")
    if place.get("transform_descriptors"):
        raise ValueError(f"{key['fqn']!r} was transformed when it was saved: {place['transform_descriptors']!r}")
    file = _text(place["relative_path"])
    if lies_outside(file):
        raise ValueError(f"it names the file {file!r}, which lies outside its folder")
    offset = None if key.get("offset") is None else _sizes(key["offset"])
    return (_text(key["fqn"]), offset), _Bytes(file, *_sizes((place["offset"], place["length"])))


def _stored_tensor(
    name: str, fields: dict[str, Any], where: dict[tuple[str, tuple[int, ...] | None], _Bytes]
) -> StoredTensor:
    dtype = fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} has no dtype")
    chunks = []
    for record in fields["chunks"]:
        chunk = record.fields("ChunkStorageMetadata")
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        place = where.get((name, offsets)) or where[name, None]
        chunks.append(StoredChunk(offsets, sizes, *place))
    tensor = StoredTensor(dtype, _sizes(fields["size"]), tuple(chunks))
    _check_covered(name, tensor)
    return tensor


def _check_covered(name: str, tensor: StoredTensor) -> None:
    """The chunks lie inside the tensor, apart from each other, and leave nothing out."""
    dims = len(tensor.shape)
    if any(len(chunk.offsets) != dims or len(chunk.sizes) != dims for chunk in tensor.chunks):
        raise ValueError(f"{name!r} of {dims} dimensions has a chunk of another number")
    shape = (len(tensor.chunks), dims)
    starts = torch.tensor([chunk.offsets for chunk in tensor.chunks], dtype=torch.int64).view(shape)
    ends = starts + torch.tensor([chunk.sizes for chunk in tensor.chunks], dtype=torch.int64).view(shape)
    inside = bool((ends <= torch.tensor(tensor.shape, dtype=torch.int64)).all())
    held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    apart = (torch.maximum(starts, starts.unsqueeze(1)) >= torch.minimum(ends, ends.unsqueeze(1))).any(-1)
    if not inside or held != math.prod(tensor.shape) or int((~apart).sum()) > len(tensor.chunks):
        raise ValueError(f"the chunks of {name!r} do not cover its shape {list(tensor.shape)} once")


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(size) is int and 0 <= size < 2**60 for size in sizes):
        raise TypeError(f"sizes must be whole numbers of 0 or more; got {sizes!r}")
    return sizes


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name must be text; got {value!r}")
    return value
