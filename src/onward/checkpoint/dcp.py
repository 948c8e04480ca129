"""torch.distributed.checkpoint folders: the weights that the ranks of a training run saved, read by one process."""

import io
import math
import zipfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from onward.checkpoint.dcp_metadata import StoredChunk, StoredTensor, read_metadata
from onward.checkpoint.mapped_tensors import MappedTensors
from onward.checkpoint.name_map import NameMap
from onward.checkpoint.shards import METADATA, is_there, weight_files
from onward.errors import CheckpointError, one_line
from onward.models import Architecture

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
        if isinstance(part, Tensor) and (layout := _unusual_layout(part)) is not None:
            raise CheckpointError(f"{path}: tensor {name!r} is {layout}: save it as a dense (strided) tensor")
        if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != stored.dtype:
            got = f"{part.dtype} {list(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise CheckpointError(
                f"{path}: tensor {name!r} should be {stored.dtype} {list(chunk.sizes)} by the metadata; got {got}"
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


def _unusual_layout(tensor: Tensor) -> str | None:
    """Describe a tensor that is not dense on the CPU; None for a dense one."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    return f"on the device {tensor.device}" if tensor.device.type != "cpu" else None
