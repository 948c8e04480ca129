"""The `.metadata` of a torch.distributed.checkpoint folder: which bytes of which file hold which part of a tensor.

It is a pickle, so a program. The unpickler here admits, by exact name, classes that a checkpoint needs, as records
without behaviour, and every value of the data is checked. A hostile file can end the process, but run nothing in it.
"""

import math
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as brief  # a whole repr of a stranger's value may not fit in memory
from typing import Any, NamedTuple

import torch

from onward.checkpoint.shards import METADATA as METADATA
from onward.checkpoint.shards import lies_outside
from onward.errors import CheckpointError, one_line

# Bytes. A thousand ranks with a thousand tensors write some 150 MB.
_LONGEST = 2**30
# A device mesh cuts a tensor into a grid of about as many cells as there are chunks.
_MOST_CELLS = 2**24


_ChunkName = tuple[str, tuple[int, ...] | None]  # of the tensor, and the chunk's offsets


class StoredChunk(NamedTuple):
    """A box of a tensor, and where torch.save wrote it: `length` bytes of `file`, from `start` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor in chunks, which cover each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


class PickledRecord:
    """Stands for an instance of an admitted class: its state without behaviour."""

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


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by their dotted names, without entries that are no tensor (a step, a schedule)."""
    file = folder / METADATA
    root = _unpickle(file)
    try:
        fields = root.fields("Metadata")
        places = dict(_storage(*item) for item in fields["storage_data"].items())
        tensors = {
            _text(name): entry.fields("TensorStorageMetadata")
            for name, entry in fields["state_dict_metadata"].items()
            if entry.kind != "BytesStorageMetadata"
        }
        # A pickle can refer to one list of chunks a million times; in a real one each chunk has bytes of its own.
        if sum(len(entry["chunks"]) for entry in tensors.values()) > 2 * len(places):
            raise ValueError("it has more chunks than places in files")
        return {name: _stored_tensor(name, entry, places) for name, entry in tensors.items()}
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not the metadata of a torch.distributed.checkpoint folder ({type(error).__name__}: "
            f"{one_line(error)})"
        ) from error


def _storage(index: PickledRecord, info: PickledRecord) -> tuple[_ChunkName, tuple[str, int, int]]:
    """One entry of the storage data: the chunk's name, and (file, start, length) of its bytes."""
    key, place = index.fields("MetadataIndex"), info.fields("_StorageInfo")
    if place.get("transform_descriptors"):
        raise ValueError(
            f"{brief(key['fqn'])} was transformed when it was saved: {brief(place['transform_descriptors'])}"
        )
    file = _text(place["relative_path"])
    if lies_outside(file):
        raise ValueError(f"it names the file {file!r}, which lies outside its folder")
    offset = None if key.get("offset") is None else _sizes(key["offset"])
    start, length = _sizes((place["offset"], place["length"]))
    return (_text(key["fqn"]), offset), (file, start, length)


def _stored_tensor(name: str, fields: dict[str, Any], places: dict[_ChunkName, tuple[str, int, int]]) -> StoredTensor:
    dtype = fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} has no dtype")
    chunks = []
    for record in fields["chunks"]:
        chunk = record.fields("ChunkStorageMetadata")
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        place = places.get((name, offsets)) or places[name, None]
        chunks.append(StoredChunk(offsets, sizes, *place))
    tensor = StoredTensor(dtype, _sizes(fields["size"]), tuple(chunks))
    if not covers_once(tensor.shape, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise ValueError(f"the chunks of {name!r} do not cover its shape {list(tensor.shape)} once")
    return tensor


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(size) is int and 0 <= size < 2**60 for size in values):
        raise TypeError(f"sizes must be whole numbers of 0 or more; got {brief(values)}")
    return tuple(values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name must be text; got {brief(value)}")
    return value


def covers_once(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether every element of `shape` is in exactly one box, (offsets, sizes)."""
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        raise ValueError(f"a tensor of {len(shape)} dimensions has a chunk of another number")
    spans = [[(at, at + size) for at, size in zip(*box, strict=True)] for box in boxes]
    if any(end > limit for box in spans for (_, end), limit in zip(box, shape, strict=True)):
        return False
    # An empty shard, as the last ranks have of a small tensor, covers nothing.
    volumes = [math.prod(sizes) for _, sizes in boxes]
    spans = [box for box, volume in zip(spans, volumes, strict=True) if volume]
    if sum(volumes) != math.prod(shape):
        return False
    # Where no two boxes share a cell of the grid that all their ends make, they cover what their volumes add up to.
    ends = [sorted({end for box in spans for end in box[dim]}) for dim in range(len(shape))]
    if math.prod(map(len, ends)) > _MOST_CELLS:
        raise ValueError(f"{len(spans)} chunks of one tensor interlock as no sharding makes them")
    places = [{end: place for place, end in enumerate(each)} for each in ends]
    taken = torch.zeros([len(each) for each in ends], dtype=torch.bool)
    for box in spans:
        cells = taken[tuple(slice(place[start], place[end]) for place, (start, end) in zip(places, box, strict=True))]
        if cells.any():
            return False
        cells.fill_(True)
    return True


# ── the pickle ────────────────────────────────────────────────────────────────────────────────────────────────


# PyTorch before 2.3 kept the tensors' properties elsewhere. Paths become records, too: of their parts.
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
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


def _unpickle(file: Path) -> Any:
    """The root object: `PickledRecord`s, dtypes and Python's own containers."""
    try:
        if (length := file.stat().st_size) > _LONGEST:
            raise ValueError(f"it has {length} bytes, and {_LONGEST} are the most")
        with file.open("rb") as content:
            return _Unpickler(content).load()
    except CheckpointError as error:
        raise CheckpointError(f"{file} {error}") from None
    except Exception as error:  # whatever a stranger's program may raise
        raise CheckpointError(f"{file} cannot be read ({one_line(error)}): save the checkpoint again") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _RECORDS.get(module_name, ()):
            return type(global_name, (PickledRecord,), {"kind": global_name})
        if (module_name, global_name) in _PLAIN:
            return _PLAIN[module_name, global_name]
        raise CheckpointError(
            f"is a pickle that wants {module_name}.{global_name}, which no checkpoint of tensors needs: it was not "
            "run. Read it only with the program that wrote it, if you trust where it is from"
        )
