"""Tensors of any file under Hugging Face's names, by a name map: whole tensors, or rows of larger ones."""

import math
from abc import ABC, abstractmethod
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

# Parts of names under which trainers keep what is not the model. No weight of a family has one of them in its name.
_TRAINING_STATE = {
    *("dataloader", "grad_scaler", "lr_scheduler", "lr_schedulers", "optim", "optimizer", "optimizers", "rng_state"),
    *("scheduler", "train_state", "trainer"),
}


class _Place(NamedTuple):
    """Where a weight is: `rows` of a stored tensor from `start` on (None: all of it)."""

    stored: str
    interleaved: bool
    start: int = 0
    rows: int | None = None


class MappedTensors(ABC):
    """The tensors of a folder under the names that a name map gives them; remembers which were taken. stored: by the
    names in the files. dtype: None for that of the first tensor taken."""

    def __init__(
        self,
        folder: Path,
        config: Architecture,
        dtype: torch.dtype | None,
        device: torch.device,
        stored: Mapping[str, Tensor] | Mapping[str, StoredTensor],
        name_map: NameMap,
    ) -> None:
        self.dtype = dtype
        self._folder = folder
        self._config = config
        self._device = device
        self._head_dim = config.cached[0].key_dim
        self._shapes = parameter_shapes(config)
        self._stored = stored
        self._name_map = name_map
        self._places = self._locate(name_map)
        self._taken: set[str] = set()

    @abstractmethod
    def _read_tensor(self, name: str) -> Tensor:
        """The tensor of this name in the files."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, of `shape`, in `dtype`, or the model's, on the wanted device."""
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
        for name in [name for name in self._shapes if name not in places]:
            if (twin := tied_twin(name, self._config)) in places:  # a head's name for the embedding that it is tied to
                places[name] = places.pop(twin)
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


def _as_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows [heads * head_dim, …] of each head from rotated pairs of neighbours to two rotated halves."""
    assert math.prod(tensor.shape) % head_dim == 0
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


class MappedSafetensors(MappedTensors):
    """The tensors of a folder of safetensors by a name map. Whole tensors stay views of the mapped file."""

    def __init__(
        self, folder: Path, config: Architecture, dtype: torch.dtype | None, device: torch.device, name_map: NameMap
    ) -> None:
        files = SafetensorsFolder(folder, dtype, device)
        if files.is_quantized():
            raise RequestError(f"a name map is for weights in floats, and config.json of {folder} says quantized ones")
        self._tensors = files.named()
        super().__init__(folder, config, dtype, device, self._tensors, name_map)

    def _read_tensor(self, name: str) -> Tensor:
        return self._tensors[name]
