"""The `.metadata` of a torch.distributed.checkpoint folder: which bytes of which file hold which part of a tensor.

It is a pickle, from which only data can come (`onward.checkpoint.dcp_pickle`). This file checks every value of it.
"""

import reprlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onward.checkpoint.dcp_chunks import covers_once
from onward.checkpoint.dcp_pickle import Record, read_pickle
from onward.checkpoint.shards import METADATA as METADATA
from onward.checkpoint.shards import lies_outside
from onward.errors import CheckpointError, one_line


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


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by their dotted names. Entries that are no tensor (a step, a schedule) are left out.

    Raises:
        CheckpointError: the file names a class that no checkpoint needs, is damaged, or contradicts itself.
    """
    file = folder / METADATA
    root = read_pickle(file)
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


class _Bytes(NamedTuple):
    """`length` bytes of `file`, from `start` on."""

    file: str
    start: int
    length: int


def _storage(index: Record, info: Record) -> tuple[tuple[str, tuple[int, ...] | None], _Bytes]:
    """One entry of the storage data: (a tensor's name, a chunk's offset), and its bytes."""
    key, place = index.fields("MetadataIndex"), info.fields("_StorageInfo")
    if place.get("transform_descriptors"):
        raise ValueError(
            f"{_brief(key['fqn'])} was transformed when it was saved: {_brief(place['transform_descriptors'])}"
        )
    file = _text(place["relative_path"])
    if lies_outside(file):
        raise ValueError(f"it names the file {file!r}, which lies outside its folder")
    offset = None if key.get("offset") is None else _sizes(key["offset"])
    return (_text(key["fqn"]), offset), _Bytes(file, *_sizes((place["offset"], place["length"])))


def _stored_tensor(
    name: str, fields: dict[str, Any], places: dict[tuple[str, tuple[int, ...] | None], _Bytes]
) -> StoredTensor:
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
        raise TypeError(f"sizes must be whole numbers of 0 or more; got {_brief(values)}")
    return tuple(values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name must be text; got {_brief(value)}")
    return value


def _brief(value: Any) -> str:
    """A value of a stranger's pickle, shortened: its whole repr may not fit in memory."""
    return reprlib.repr(value)
