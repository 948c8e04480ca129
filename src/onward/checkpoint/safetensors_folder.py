"""The tensors of a folder of safetensors by their stock names, mapped: memory holds the file's own pages."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from onward.checkpoint.placing import check_float, placed
from onward.checkpoint.quantizers import method_of, mxfp4
from onward.checkpoint.shards import INDEX, WEIGHTS, is_there, open_safetensors, read_index, weight_files
from onward.checkpoint.stacked_experts import StackedPart, stacked_part
from onward.errors import CheckpointError, one_line
from onward.ops import QuantizedWeight

_OLDER_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
# Files of weights, by which an error names what a folder has instead of readable safetensors.
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors", "*.distcp")


class SafetensorsFolder:
    """The tensors of a checkpoint folder by name; it remembers which were taken.

    A tensor that already has the wanted dtype and device is a view of the memory map, not a copy.

    dtype: to convert to; None: that of the first tensor taken, or with `own_dtypes` each tensor's own. keeps_bits: give
    matrices that are stored in few bits, and that the kernels multiply with as they are, as `QuantizedWeight`; else
    floats. in_floats: modules whose weights were quantized and became floats.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype | None,
        device: torch.device,
        *,
        keeps_bits: bool = False,
        own_dtypes: bool = False,
    ) -> None:
        self.dtype = dtype
        self._own_dtypes = own_dtypes
        self.in_floats: list[str] = []
        self._order: Tensor | None = None
        self._keeps_bits = keeps_bits
        self._folder = folder
        self._device = device
        self._files: dict[str, Any] = {}
        located = self._locate()
        self._stored = {_renamed(name): name for name in located}
        self._where = {_renamed(name): file for name, file in located.items()}
        self._taken: set[str] = set()
        self._taken_parts: dict[str, set[str]] = {}  # tensor of all experts -> names of the parts that were taken
        self._method = method_of(_config_of(folder))
        self._below = _by_module(self._where) if self._method is not None else {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor | QuantizedWeight:
        """The tensor `name`, of `shape`, in `dtype`, or the model's, on the wanted device.

        Raises:
            CheckpointError: it is absent, has another shape, is no float, or is too large for float16.
        """
        module, _, kind = name.rpartition(".")
        parts = (
            set() if self._method is None or kind != "weight" else self._method.parts(self._below.get(module, set()))
        )
        if parts:
            return self._few_bits(module, parts, shape)
        if name not in self._where:
            if (stacked := stacked_part(name, self._where)) is not None:
                return self._from_stack(name, stacked, shape)
            raise CheckpointError(f"{self._folder}: tensor {name!r} of shape {list(shape)} is missing from the weights")
        file, tensor = self._where[name], self._read(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._folder / file}: tensor {name!r} has shape {list(tensor.shape)}, but config.json "
                f"makes it {list(shape)}"
            )
        check_float(self._folder / file, name, tensor.dtype)
        self._taken.add(name)
        if dtype is None:
            dtype = self._dtype_of(tensor)
        return placed(self._folder, name, tensor, dtype, self._device)

    def all(self) -> dict[str, Tensor]:
        """Every tensor by name, floats in the wanted dtype and all on the wanted device."""
        found: dict[str, Tensor] = {}
        for name, file in self._where.items():
            tensor: Tensor = self._open(file).get_tensor(name)
            dtype = self.dtype if tensor.is_floating_point() else None
            found[name] = placed(self._folder, name, tensor, dtype, self._device)
        return found

    def left(self) -> list[str]:
        """Names that were not taken."""
        return sorted(set(self._where) - self._taken)

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        """That of a weight which follows the model's."""
        if self.dtype is None and self._own_dtypes:
            return tensor.dtype
        self.dtype = self.dtype or tensor.dtype
        return self.dtype

    def _few_bits(self, module: str, parts: set[str], shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
        """The weight of a module that another library quantized: in its bits, or in floats."""
        assert self._method is not None
        if len(shape) != 2:
            raise CheckpointError(
                f"{self._folder}: {module} is quantized, but config.json makes its weight {list(shape)}"
            )
        own, read = (shape[0], shape[1]), lambda part: self._read(f"{module}.{part}")
        packed = None
        try:
            if self._keeps():
                assert self.dtype is not None
                packed = self._method.held(read, parts, own, self.dtype)
            weight = self._method.weight(read, parts, own) if packed is None else None
        except (ValueError, KeyError, StopIteration, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"{self._folder}: the quantized weight of {module}, {list(shape)} by config.json, cannot be read: "
                f"{one_line(error)}"
            ) from error
        self._taken |= {f"{module}.{part}" for part in parts}
        if packed is not None:
            return self._of_shared_order(packed)
        assert weight is not None
        self.in_floats.append(module)
        return placed(self._folder, f"{module}.weight", weight.contiguous(), self.dtype, self._device)

    def _keeps(self) -> bool:
        """float32 asks for products that round nothing, and only the CPU has kernels for packed weights."""
        return self._keeps_bits and self.dtype not in (None, torch.float32) and self._device.type == "cpu"

    def _of_shared_order(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Weights of the same inputs come one after the other, and often have one order: then it is one tensor."""
        if weight.order is None:
            return weight
        if self._order is None or not torch.equal(self._order, weight.order):
            self._order = weight.order
        return weight.in_order(self._order)

    def _from_stack(self, name: str, part: StackedPart, shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
        """A weight that lies in a tensor of all experts."""
        stored, first = [self._read(tensor) for tensor in part.tensors], part.tensors[0]
        file = self._folder / self._where[first]
        try:
            own = [part.of(values) for values in stored]
            if len(own) == 2:
                weight = self._from_mxfp4(name, own[0], own[1], (shape[0], shape[1]))
            elif tuple(own[0].shape) != shape:
                raise ValueError(f"its part has shape {list(own[0].shape)}")
            else:
                check_float(file, first, own[0].dtype)
                weight = placed(self._folder, name, own[0], self._dtype_of(own[0]), self._device)
        except (ValueError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"{file}: tensor {first!r} {list(stored[0].shape)} must hold {name!r}, {list(shape)} by config.json: "
                f"{one_line(error)}"
            ) from error
        for tensor, values in zip(part.tensors, stored, strict=True):
            names = self._taken_parts.setdefault(tensor, set())
            names.add(name)
            if len(names) == part.count(values):
                self._taken.add(tensor)
        return weight

    def _from_mxfp4(
        self, name: str, blocks: Tensor, scales: Tensor, shape: tuple[int, int]
    ) -> Tensor | QuantizedWeight:
        if self._keeps():
            assert self.dtype is not None
            return mxfp4.packed(blocks, scales, shape, self.dtype)
        self.in_floats.append(name.removesuffix(".weight"))
        return placed(self._folder, name, mxfp4.dequantized(blocks, scales, shape), self.dtype, self._device)

    def _read(self, name: str) -> Tensor:
        """The tensor as it is stored."""
        if name not in self._where:
            raise CheckpointError(f"{self._folder}: tensor {name!r} is missing from the weights")
        file = self._where[name]
        try:
            tensor: Tensor = self._open(file).get_tensor(self._stored[name])
        except (SafetensorError, RuntimeError, ValueError, MemoryError) as error:
            raise CheckpointError(
                f"{self._folder / file}: tensor {name!r} cannot be read: {one_line(error)}"
            ) from error
        return tensor

    def _locate(self) -> dict[str, str]:
        """The file of each tensor: as the index says, or for tensors that it does not name, by what the files hold."""
        files = weight_files(self._folder)
        if not files:
            others = sorted(file.name for pattern in _OTHER_FORMATS for file in self._folder.glob(pattern))
            hint = f"; it holds {', '.join(others[:3])}: save the model as safetensors first" if others else ""
            if others and all(file.endswith(".distcp") for file in others):
                hint = f"; it holds {others[0]} and no .metadata, which is written last: the save was not finished"
            raise CheckpointError(f"{self._folder} holds no weights: neither {WEIGHTS} nor {INDEX}{hint}")
        names_by_file = {file: self._names(file) for file in files}
        where = {name: file for file, names in names_by_file.items() for name in names}
        if files == [WEIGHTS]:
            return where
        indexed = read_index(self._folder / INDEX)
        for name, file in indexed.items():
            if name not in names_by_file[file]:
                raise CheckpointError(f"{self._folder / INDEX} names {name!r} in {file}, which does not hold it")
        return where | indexed

    def _names(self, file: str) -> set[str]:
        return set(self._open(file).keys())

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            if not is_there(path):
                raise CheckpointError(f"{path} is missing, though the index names it: download or save it again")
            self._files[file] = open_safetensors(path)
        return self._files[file]


def _config_of(folder: Path) -> Mapping[str, Any]:
    """The folder's config.json, as far as it can be read: what is wrong with it is said by who reads it as a whole."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _by_module(names: Iterable[str]) -> dict[str, set[str]]:
    """Module -> the names below it. A name may have a dot of its own: "weight.absmax"."""
    below: dict[str, set[str]] = {}
    for name in names:
        module, dot, inside = name.rpartition(".weight.")
        if not dot:
            module, _, inside = name.rpartition(".")
        below.setdefault(module, set()).add(f"weight.{inside}" if dot else inside)
    return below


def _renamed(name: str) -> str:
    """The name of today for a name that multimodal checkpoints had before transformers 4.52."""
    for old, new in _OLDER_NAMES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
