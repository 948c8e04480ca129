"""Tensors from any file under Hugging Face names, by a name map: whole tensors, or rows of larger ones."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from onward.checkpoint.dcp_metadata import StoredTensor
from onward.checkpoint.name_map import NameMap, is_rotated, proposed_map
from onward.checkpoint.safetensors import SafetensorsFolder
from onward.checkpoint.shards import check_float, placed
from onward.checkpoint.stored_names import tied_twin
from onward.errors import CheckpointError, RequestError
from onward.models import Architecture, parameter_shapes

# Parts of names that mark training state. No weight of a supported model has one of them in its name.
_TRAINING_STATE = {
    *("dataloader", "grad_scaler", "lr_scheduler", "lr_schedulers", "optim", "optimizer", "optimizers", "rng_state"),
    *("scheduler", "train_state", "trainer"),
}


class _Place(NamedTuple):
    """The location of a weight: `rows` of a stored tensor from `start` on (None: all of it)."""

    stored: str
    interleaved: bool
    start: int = 0
    rows: int | None = None


class MappedTensors:
    """The tensors of a folder by a name map; tracks which were read. stored: by the names in the files."""

    def __init__(
        self,
        folder: Path,
        config: Architecture,
        dtype: torch.dtype | None,
        device: torch.device,
        stored: Mapping[str, Tensor] | Mapping[str, StoredTensor],
        name_map: NameMap,
    ) -> None:
        self.dtype, self._folder, self._config, self._device = dtype, folder, config, device
        self._stored, self._name_map = stored, name_map
        self._head_dim, self._shapes = config.cached[0].key_dim, parameter_shapes(config)
        self._places = self._locate(name_map)
        self._consumed: set[str] = set()

    def _read_tensor(self, name: str) -> Tensor:
        tensor = self._stored[name]
        assert isinstance(tensor, Tensor)
        return tensor

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Read the tensor `name` of `shape`, in `dtype` or else the model's, on the model's device."""
        place = self._places[name]
        stored = self._stored[place.stored]
        stored_shape = stored.shape if place.rows is None else (place.rows, *stored.shape[1:])
        label = name if place.stored == name else f"{place.stored!r}, which is {name!r},"
        if stored_shape != shape:
            got = list(stored_shape)
            raise CheckpointError(f"{self._folder}: {label} has shape {got}, but config.json expects {list(shape)}")
        check_float(self._folder, place.stored, stored.dtype)
        tensor = self._read_tensor(place.stored)
        if dtype is None:
            dtype = self.dtype = self.dtype or tensor.dtype
        if place.rows is not None:
            tensor = tensor[place.start : place.start + place.rows]
        if place.interleaved and is_rotated(name):
            tensor = _as_halves(tensor, self._head_dim)
        self._consumed.add(name)
        return placed(self._folder, name, tensor, dtype, self._device)

    def unread(self) -> list[str]:
        """Names that were not read, without training state."""
        names = sorted(set(self._places) - self._consumed)
        return [name for name in names if not self._is_training_state(self._places[name].stored)]

    def proposal(self) -> str:
        """The end of an error about mismatched names: a name map that fixes them, if there is one."""
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        proposed = proposed_map(self._name_map.entries, shapes, self._shapes, self._is_training_state)
        return "" if proposed is None else f"; they all fit with the name map {proposed}"

    def _is_training_state(self, stored: str) -> bool:
        # A scalar is a step count or a loss, never a weight.
        return self._stored[stored].shape == () or not _TRAINING_STATE.isdisjoint(stored.split("."))

    def _locate(self, name_map: NameMap) -> dict[str, _Place]:
        places: dict[str, _Place] = {}
        for stored in self._stored:
            target = name_map(stored)
            if target is None:
                continue
            for name, place in zip(target.names, self._split_rows(stored, *target), strict=True):
                if name in places:
                    both = f"{places[name].stored!r} and {stored!r}"
                    raise CheckpointError(f"{self._folder}: both {both} map to {name!r}: map one of them to null")
                places[name] = place
        for name in [name for name in self._shapes if name not in places]:
            if (twin := tied_twin(name, self._config)) in places:  # the file has the tied weight under its other name
                places[name] = places.pop(twin)
        if missing := [name for name in self._shapes if name not in places]:
            example = f"{missing[0]!r} of shape {list(self._shapes[missing[0]])}"
            hint = self._leftover_hint(places)
            raise CheckpointError(f"{self._folder}: {len(missing)} weights are missing, such as {example}{hint}")
        return places

    def _split_rows(self, stored: str, names: tuple[str, ...], interleaved: bool) -> list[_Place]:
        if len(names) == 1:
            return [_Place(stored, interleaved)]
        if unknown := [name for name in names if name not in self._shapes]:
            raise CheckpointError(f"{self._folder}: {stored!r} maps to {unknown[0]!r}, which is not in config.json")
        rows = [self._shapes[name][0] for name in names]
        if self._stored[stored].shape[:1] != (sum(rows),):
            raise CheckpointError(
                f"{self._folder}: tensor {stored!r} has shape {list(self._stored[stored].shape)}, but is mapped to "
                f"{' + '.join(map(str, rows))} rows of {', '.join(names)}"
            )
        starts = [sum(rows[:at]) for at in range(len(rows))]
        return [_Place(stored, interleaved, start, count) for start, count in zip(starts, rows, strict=True)]

    def _leftover_hint(self, places: dict[str, _Place]) -> str:
        unknown = [place.stored for name, place in places.items() if name not in self._shapes]
        unknown = [name for name in unknown if not self._is_training_state(name)]
        if not unknown:
            return ""
        return f"; it holds {', '.join(map(repr, unknown[:3]))}: give a name map (docs/training.md){self.proposal()}"


def _as_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows [heads * head_dim, …] of each head from rotated adjacent pairs to two rotated halves."""
    assert math.prod(tensor.shape) % head_dim == 0
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def mapped_safetensors(
    folder: Path, config: Architecture, dtype: torch.dtype | None, device: torch.device, name_map: NameMap
) -> MappedTensors:
    """The tensors of a safetensors folder by a name map. Whole tensors stay views of the mapped file."""
    files = SafetensorsFolder(folder, dtype, device)
    if files.is_quantized():
        raise RequestError(f"a name map requires float weights, but config.json of {folder} describes quantized ones")
    return MappedTensors(folder, config, dtype, device, files.named(), name_map)
