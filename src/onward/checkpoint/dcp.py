"""torch.distributed.checkpoint folders: the weights that the ranks of a training run saved, read by one process.

`.metadata` tells which bytes of which file hold which part of a tensor. It is a pickle, and so a program. The unpickler
admits only the classes that a checkpoint needs, by exact name and as records without behavior, and every value is
checked. A hostile file can end the process, but cannot run code.
"""

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from reprlib import repr as brief  # the full repr of an untrusted value may not fit in memory
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from onward.checkpoint.name_map import MappedTensors, NameMap
from onward.checkpoint.shards import METADATA, is_there, lies_outside, weight_files
from onward.errors import CheckpointError, one_line
from onward.models import Architecture

# In bytes. A thousand ranks with a thousand tensors write some 150 MB.
_MAX_LENGTH = 2**30
# A device mesh cuts a tensor into a grid with about as many cells as there are chunks.
_MAX_CELLS = 2**24

_ChunkName = tuple[str, tuple[int, ...] | None]  # of the tensor, and the chunk's offsets


class StoredChunk(NamedTuple):
    """A box of a tensor that torch.save wrote: `length` bytes of `file`, from `start` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor in chunks that cover each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


class PickledRecord:
    """The state of an instance of an admitted class, without behavior."""

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
    """The tensors of a checkpoint by dotted name, without other entries (a step, a schedule)."""
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
        # A pickle can repeat one list of chunks a million times; in a real one each chunk has its own bytes.
        if sum(len(entry["chunks"]) for entry in tensors.values()) > 2 * len(places):
            raise ValueError("it has more chunks than the files hold")
        return {name: _stored_tensor(name, entry, places) for name, entry in tensors.items()}
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise CheckpointError(f"{file} is not the metadata of a torch.distributed.checkpoint: {reason}") from error


def _storage(index: PickledRecord, info: PickledRecord) -> tuple[_ChunkName, tuple[str, int, int]]:
    """An entry of the storage data: the chunk's name, and (file, start, length) of its bytes."""
    key, place = index.fields("MetadataIndex"), info.fields("_StorageInfo")
    if place.get("transform_descriptors"):
        transforms = brief(place["transform_descriptors"])
        raise ValueError(f"{brief(key['fqn'])} was transformed when it was saved: {transforms}")
    file = _text(place["relative_path"])
    if lies_outside(file):
        raise ValueError(f"it refers to the file {file!r}, which is outside its folder")
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
        raise TypeError(f"sizes must be non-negative integers; got {brief(values)}")
    return tuple(values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name must be a string; got {brief(value)}")
    return value


def covers_once(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether every element of `shape` is in exactly one box (offsets, sizes)."""
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        raise ValueError(f"a tensor of {len(shape)} dimensions has a chunk with a different number of them")
    spans = [[(at, at + size) for at, size in zip(*box, strict=True)] for box in boxes]
    if any(end > limit for box in spans for (_, end), limit in zip(box, shape, strict=True)):
        return False
    # An empty shard, which the last ranks have for a small tensor, covers nothing.
    volumes = [math.prod(sizes) for _, sizes in boxes]
    spans = [box for box, volume in zip(spans, volumes, strict=True) if volume]
    if sum(volumes) != math.prod(shape):
        return False
    # If no two boxes share a cell of the grid formed by all box edges, they cover the sum of their volumes.
    ends = [sorted({end for box in spans for end in box[dim]}) for dim in range(len(shape))]
    if math.prod(map(len, ends)) > _MAX_CELLS:
        raise ValueError(f"{len(spans)} chunks of one tensor interlock, which no sharding produces")
    places = [{end: place for place, end in enumerate(each)} for each in ends]
    covered = torch.zeros([len(each) for each in ends], dtype=torch.bool)
    for box in spans:
        cells = covered[tuple(slice(place[start], place[end]) for place, (start, end) in zip(places, box, strict=True))]
        if cells.any():
            return False
        cells.fill_(True)
    return True


# PyTorch before 2.3 defined the tensors' properties elsewhere. Paths become records of their parts.
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
    try:
        if (length := file.stat().st_size) > _MAX_LENGTH:
            raise ValueError(f"it has {length} bytes, more than the limit of {_MAX_LENGTH}")
        with file.open("rb") as content:
            return _Unpickler(content).load()
    except CheckpointError as error:
        raise CheckpointError(f"{file} {error}") from None
    except Exception as error:  # an untrusted pickle may raise anything
        raise CheckpointError(f"{file} cannot be read ({one_line(error)}): save the checkpoint again") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _RECORDS.get(module_name, ()):
            return type(global_name, (PickledRecord,), {"kind": global_name})
        if (module_name, global_name) in _PLAIN:
            return _PLAIN[module_name, global_name]
        raise CheckpointError(
            f"is a pickle that uses {module_name}.{global_name}, which no checkpoint of tensors needs: it was not "
            "run. Read it only with the program that wrote it, if you trust its source"
        )


NameMapSource = str | PathLike[str] | Mapping[str, Any] | None


def is_distributed(folder: Path) -> bool:
    """Whether the weights are a torch.distributed.checkpoint. Safetensors beside it take precedence."""
    return (folder / METADATA).is_file() and not weight_files(folder)


class DcpFolder(MappedTensors):
    """The tensors of a torch.distributed.checkpoint folder, read one at a time. name_map: None for the folder's own."""

    def __init__(
        self,
        folder: Path,
        config: Architecture,
        dtype: torch.dtype | None,
        device: torch.device,
        name_map: NameMapSource = None,
    ) -> None:
        self._tensors = read_metadata(folder)
        super().__init__(folder, config, dtype, device, self._tensors, NameMap.of(name_map, folder))
        self._check_files()
        self._last: tuple[str, Tensor] | None = None  # the last tensor read: the next weights may be rows of it too

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for name in self._shapes:
            place = self._places[name]
            stored = self._tensors[place.stored]
            for chunk in stored.chunks:
                needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.start + chunk.length)
                # Otherwise memory would be allocated for data that no file holds.
                if math.prod(chunk.sizes) * stored.dtype.itemsize > chunk.length:
                    raise CheckpointError(
                        f"{self._folder / METADATA}: {chunk.length} bytes of {chunk.file} cannot hold "
                        f"{stored.dtype} {list(chunk.sizes)} of tensor {place.stored!r}: save the checkpoint again"
                    )
        for file, size in needed.items():
            path = self._folder / file
            if not is_there(path):
                raise CheckpointError(f"{path} is missing, though the metadata lists it: copy all files of the folder")
            if path.stat().st_size < size:
                size_of = f"{path.stat().st_size} of {size} bytes"
                raise CheckpointError(f"{path} is truncated to {size_of}: copy or save it again")

    def _read_tensor(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # free its memory first
            self._last = (name, self._join_chunks(name, self._tensors[name]))
        return self._last[1]

    def _join_chunks(self, name: str, stored: StoredTensor) -> Tensor:
        if len(stored.chunks) == 1:
            return self._read_chunk(name, stored, stored.chunks[0])
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = self._read_chunk(name, stored, chunk)
        return whole

    def _read_chunk(self, name: str, stored: StoredTensor, chunk: StoredChunk) -> Tensor:
        path = self._folder / chunk.file
        try:
            with path.open("rb") as file:
                content = cast(IO[bytes], _Slice(file, chunk.start, chunk.length))
                _check_archive(content, chunk.length)
                part = torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # torch may raise anything for an untrusted file
            raise CheckpointError(
                f"{path}: tensor {name!r} cannot be read: {one_line(error)[:200]}: copy or save it again"
            ) from error
        if isinstance(part, Tensor) and (part.is_nested or part.layout != torch.strided or part.device.type != "cpu"):
            layout = "a nested tensor" if part.is_nested else f"{part.layout} on the device {part.device}"
            raise CheckpointError(f"{path}: tensor {name!r} is {layout}: save it as a dense (strided) tensor")
        if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != stored.dtype:
            got = f"{part.dtype} {list(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise CheckpointError(
                f"{path}: tensor {name!r} should be {stored.dtype} {list(chunk.sizes)} "
                f"according to the metadata; got {got}"
            )
        return part


class _Slice(io.RawIOBase):
    """Part of a file, as a file."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        length = max(0, min(len(buffer), self._length - self._at))
        count = self._file.readinto(memoryview(buffer)[:length])
        self._at += count
        return count


def _check_archive(content: IO[bytes], length: int) -> None:
    """Raise unless this is an uncompressed zip archive, as torch.save writes, that cannot expand beyond its length."""
    with zipfile.ZipFile(content) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("it is compressed, unlike the output of torch.save")
    if sum(record.file_size for record in records) > length:
        raise ValueError("its parts are larger than the whole")
    content.seek(0)
