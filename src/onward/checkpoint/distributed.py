"""torch.distributed.checkpoint folders: the weights of a training run as its ranks saved them, read by one process."""

import io
import math
import zipfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from onward.checkpoint.dcp_metadata import METADATA, StoredChunk, StoredTensor, read_metadata
from onward.checkpoint.name_map import NameMap, is_rotated
from onward.checkpoint.name_map_proposal import proposed_map
from onward.checkpoint.placing import check_float, placed
from onward.checkpoint.shards import is_there, weight_files
from onward.errors import CheckpointError, one_line
from onward.models import Architecture, parameter_shapes

NameMapSource = str | PathLike[str] | Mapping[str, Any] | None

# Parts of names under which trainers keep what is not the model. No weight of a family has one of them in its name.
_TRAINING_STATE = {
    "dataloader",
    "grad_scaler",
    "lr_scheduler",
    "lr_schedulers",
    "optim",
    "optimizer",
    "optimizers",
    "rng_state",
    "scheduler",
    "train_state",
    "trainer",
}


def is_distributed(folder: Path) -> bool:
    """Whether the weights are a torch.distributed.checkpoint. Safetensors beside it win."""
    return (folder / METADATA).is_file() and not weight_files(folder)


class _Place(NamedTuple):
    """Where a weight is: `rows` of a stored tensor from `start` on (None: all of it)."""

    stored: str
    interleaved: bool
    start: int = 0
    rows: int | None = None


class DistributedFolder:
    """The tensors of a torch.distributed.checkpoint folder under Hugging Face's names; remembers which were taken.

    Tensors are read one at a time, from all the files that hold a part of them. The optimizer's state and the like
    are not read. Everything that the metadata tells is checked before the first tensor is read.

    folder: holds .metadata and the files it names.
    config: what the weights must fit.
    dtype: None for that of the first tensor taken.
    name_map: a JSON file or a mapping (`onward.checkpoint.name_map`); None for the folder's name_map.json, if any.

    Raises:
        CheckpointError: the pickle names what no checkpoint needs; a weight or file is missing; two tensors are for one
            weight; or a tensor has not the rows that it is to be divided into. ConfigError: the name map is wrong.
    """

    def __init__(
        self,
        folder: Path,
        config: Architecture,
        dtype: torch.dtype | None,
        device: torch.device,
        name_map: NameMapSource = None,
    ) -> None:
        self.dtype = dtype
        self._folder = folder
        self._device = device
        self._head_dim = config.cached[0].key_dim
        self._shapes = parameter_shapes(config)
        self._stored = read_metadata(folder)
        self._name_map = NameMap.of(name_map, folder)
        self._places = self._locate(self._name_map)
        self._check_files()
        self._taken: set[str] = set()
        self._last: tuple[str, Tensor] | None = None  # the last one read: several weights in a row may be its rows

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, of `shape`, in `dtype`, or the model's, on the wanted device.

        Raises:
            CheckpointError: it is of another shape, or no float, or damaged, or too large for float16.
        """
        place = self._places[name]
        stored = self._stored[place.stored]
        stored_shape = stored.shape if place.rows is None else (place.rows, *stored.shape[1:])
        label = name if place.stored == name else f"{place.stored!r}, which is {name!r},"
        if stored_shape != shape:
            raise CheckpointError(
                f"{self._folder}: tensor {label!s} has shape {list(stored_shape)}, but config.json makes it "
                f"{list(shape)}"
            )
        check_float(self._folder, place.stored, stored.dtype)
        tensor = self._read_tensor(place.stored)
        if dtype is None:
            dtype = self.dtype = self.dtype or tensor.dtype
        if place.rows is not None:
            tensor = tensor[place.start : place.start + place.rows]
        if place.interleaved and is_rotated(name):
            tensor = _as_halves(tensor, self._head_dim)
        self._taken.add(name)
        return placed(self._folder, name, tensor, dtype, self._device)

    def left(self) -> list[str]:
        """Names that were not taken, without those of the training's own state."""
        return sorted(
            name
            for name, place in self._places.items()
            if name not in self._taken and not self._is_training_state(place.stored)
        )

    def proposal(self) -> str:
        """The end of an error about names that do not fit: a name map under which they fit, or nothing."""
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        proposed = proposed_map(self._name_map.entries, shapes, self._shapes, self._is_training_state)
        return "" if proposed is None else f"; they all fit with the name map {proposed}"

    def _is_training_state(self, stored: str) -> bool:
        # A single number is a count of steps or a loss: no weight has no dimensions.
        return self._stored[stored].shape == () or not _TRAINING_STATE.isdisjoint(stored.split("."))

    # ── which tensor is which weight ──────────────────────────────────────────────────────────────────────

    def _locate(self, name_map: NameMap) -> dict[str, _Place]:
        places: dict[str, _Place] = {}
        for stored in self._stored:
            target = name_map(stored)
            if target is None:
                continue
            for name, place in zip(target.names, self._split_rows(stored, *target), strict=True):
                if name in places:
                    raise CheckpointError(
                        f"{self._folder}: both {places[name].stored!r} and {stored!r} are to be {name!r}: map one of "
                        "them to null"
                    )
                places[name] = place
        if missing := [name for name in self._shapes if name not in places]:
            raise CheckpointError(
                f"{self._folder}: {len(missing)} weights are missing, {missing[0]!r} of shape "
                f"{list(self._shapes[missing[0]])} for one{self._leftover_hint(places)}"
            )
        return places

    def _split_rows(self, stored: str, names: tuple[str, ...], interleaved: bool) -> list[_Place]:
        if len(names) == 1:
            return [_Place(stored, interleaved)]
        if unknown := [name for name in names if name not in self._shapes]:
            raise CheckpointError(
                f"{self._folder}: {stored!r} is to hold {unknown[0]!r}, which config.json has no place for"
            )
        rows = [self._shapes[name][0] for name in names]
        if self._stored[stored].shape[:1] != (sum(rows),):
            raise CheckpointError(
                f"{self._folder}: tensor {stored!r} has shape {list(self._stored[stored].shape)}, but is to hold "
                f"{' + '.join(map(str, rows))} rows of {', '.join(names)}"
            )
        starts = [sum(rows[:at]) for at in range(len(rows))]
        return [_Place(stored, interleaved, start, count) for start, count in zip(starts, rows, strict=True)]

    def _leftover_hint(self, places: dict[str, _Place]) -> str:
        """The end of an error about missing weights: the tensors that are no weight, and what to do."""
        unknown = [place.stored for name, place in places.items() if name not in self._shapes]
        unknown = [name for name in unknown if not self._is_training_state(name)]
        if not unknown:
            return ""
        return f"; it holds {', '.join(map(repr, unknown[:3]))}: give a name map (docs/training.md){self.proposal()}"

    def _check_files(self) -> None:
        """Raise unless the files that the weights need are there, and as long as the metadata says."""
        needed: dict[str, int] = {}
        for name in self._shapes:
            place = self._places[name]
            stored = self._stored[place.stored]
            for chunk in stored.chunks:
                needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.start + chunk.length)
                # Otherwise memory would be allocated for numbers that no file holds.
                if math.prod(chunk.sizes) * stored.dtype.itemsize > chunk.length:
                    raise CheckpointError(
                        f"{self._folder / METADATA}: {chunk.length} bytes of {chunk.file} cannot hold "
                        f"{stored.dtype} {list(chunk.sizes)} of tensor {place.stored!r}: save the checkpoint again"
                    )
        for file, size in needed.items():
            path = self._folder / file
            if not is_there(path):
                raise CheckpointError(f"{path} is missing, though the metadata names it: copy all files of the folder")
            if path.stat().st_size < size:
                raise CheckpointError(
                    f"{path} is cut short: it has {path.stat().st_size} bytes, and the metadata wants {size}: copy or "
                    "save it again"
                )

    # ── bytes to tensors ──────────────────────────────────────────────────────────────────────────────────

    def _read_tensor(self, name: str) -> Tensor:
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        self._last = None  # memory holds one at a time
        tensor = self._join_chunks(name, self._stored[name])
        self._last = (name, tensor)
        return tensor

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
        except Exception as error:  # whatever torch's reader of a stranger's file may raise
            raise CheckpointError(
                f"{path}: tensor {name!r} cannot be read: {one_line(error)[:200]}: copy or save it again"
            ) from error
        if isinstance(part, Tensor) and (layout := _unusual_layout(part)) is not None:
            raise CheckpointError(
                f"{path}: tensor {name!r} is {layout}, and a weight is a dense tensor (strided): save it as one"
            )
        if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != stored.dtype:
            got = f"{part.dtype} {list(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise CheckpointError(
                f"{path}: tensor {name!r} should be {stored.dtype} {list(chunk.sizes)} there by the metadata; got {got}"
            )
        return part


class _Slice(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

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
    """Raise unless it is an uncompressed zip archive, as torch.save writes: no more bytes come out than are in it."""
    with zipfile.ZipFile(content) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("it is compressed, and torch.save compresses nothing")
    if sum(record.file_size for record in records) > length:
        raise ValueError("its parts are larger than the whole")
    content.seek(0)


def _unusual_layout(tensor: Tensor) -> str | None:
    """What a tensor is that has not one number in memory for each element, in words; None for a dense one."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    return f"on the device {tensor.device}" if tensor.device.type != "cpu" else None


def _as_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows [heads * head_dim, …] of each head from rotated pairs of neighbours to two rotated halves."""
    assert math.prod(tensor.shape) % head_dim == 0
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
