"""The tensors of a folder of safetensors by their stock names, mapped: memory holds the file's own pages."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from onward.checkpoint.formats import QuantizationMethod, methods_of, mxfp4, with_settings_file
from onward.checkpoint.shards import (
    INDEX,
    WEIGHTS,
    check_float,
    is_there,
    open_safetensors,
    placed,
    read_index,
    read_object,
    weight_files,
)
from onward.checkpoint.stacked_experts import StackedPart, stacked_part
from onward.checkpoint.stored_names import has_stock_names, is_cache_scale, names_of, stock_names, tied_twin
from onward.errors import CheckpointError, ConfigError, one_line
from onward.models import Architecture
from onward.ops import QuantizedWeight

# Files of weights, by which an error names what a folder has instead of readable safetensors.
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors", "*.distcp")


class SafetensorsFolder:
    """The tensors of a checkpoint folder by name, views of the memory map where they need no conversion; it remembers
    which were taken.

    dtype: to convert to; None: that of the first tensor taken, or with `own_dtypes` each tensor's own. keeps_bits: give
    matrices in few bits that the kernels multiply with as they are as `QuantizedWeight`; else floats. config: the
    model's, whose names tensors get (`onward.checkpoint.stored_names`). in_floats: modules whose weights were quantized
    and became floats.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype | None,
        device: torch.device,
        *,
        keeps_bits: bool = False,
        own_dtypes: bool = False,
        config: Architecture | None = None,
    ) -> None:
        self.dtype = dtype
        self._own_dtypes = own_dtypes
        self.in_floats: list[str] = []
        self._order: Tensor | None = None
        self._keeps_bits = keeps_bits
        self._folder = folder
        self._device = device
        self._config = config
        self._files: dict[str, Any] = {}
        located = self._locate()
        self._stored = stock_names(located, config)
        self._where = {name: located[stored] for name, stored in self._stored.items()}
        self._taken: set[str] = set()
        self._taken_parts: dict[str, set[str]] = {}  # tensor of all experts -> names of the parts that were taken
        self._methods = methods_of(with_settings_file(folder, _config_of(folder)))
        self._below = _by_module(self._where) if self._methods is not None else {}
        self._quantized: set[str] = set()  # modules of which the parts were taken

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor | QuantizedWeight:
        """The tensor `name`, of `shape`, in `dtype`, or the model's, on the wanted device."""
        module, _, kind = name.rpartition(".")
        if self._methods is not None and kind == "weight":
            method = self._methods.of(self._stored_module(module))
            if parts := method.parts(self._below.get(module, set())):
                return self._few_bits(method, module, parts, shape)
        if name not in self._where:
            if (stacked := stacked_part(name, self._where)) is not None:
                return self._from_stack(name, stacked, shape)
            raise CheckpointError(
                f"{self._folder}: tensor {name!r} of shape {list(shape)} is missing from the weights"
                f"{self._other_names()}"
            )
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
            tensor: Tensor = self._open(file).get_tensor(self._stored[name])
            dtype = self.dtype if tensor.is_floating_point() else None
            found[name] = placed(self._folder, name, tensor, dtype, self._device)
        return found

    def find(self, name: str) -> Tensor | None:
        """The tensor of this name as it is stored; None where there is none."""
        return self._read(name) if name in self._where else None

    def left(self) -> list[str]:
        """Names that were not taken, without tensors that change nothing (`onward.checkpoint.stored_names`)."""
        names = sorted(set(self._where) - self._taken)
        if self._methods is None:
            return names
        return [name for name in names if not (is_cache_scale(name) or self._is_zero_bias(name))]

    def named(self) -> dict[str, Tensor]:
        """Every tensor as it is stored, mapped, by its name in the files."""
        return {stored: self._read(name) for name, stored in self._stored.items()}

    def is_quantized(self) -> bool:
        """Whether config.json says that another library quantized the weights."""
        return self._methods is not None

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        """That of a weight which follows the model's."""
        if self.dtype is None and self._own_dtypes:
            return tensor.dtype
        self.dtype = self.dtype or tensor.dtype
        return self.dtype

    def _is_zero_bias(self, name: str) -> bool:
        """Whether it is a bias of zeros of a quantized module: AutoGPTQ wrote them for modules without a bias."""
        module, _, kind = name.rpartition(".")
        return kind == "bias" and module in self._quantized and not bool(self._read(name).any())

    def _stored_module(self, module: str) -> str:
        """The module's name in the files, by which rules of config.json name it."""
        inside = next(iter(sorted(self._below.get(module, ()))), None)
        return module if inside is None else self._stored[f"{module}.{inside}"].removesuffix(f".{inside}")

    def _other_names(self) -> str:
        """The end of an error about a missing tensor where the names are of another layout."""
        names = names_of(self._config)
        if names is None or has_stock_names(self._where, names):
            return ""
        stored = ", ".join(map(repr, sorted(self._stored.values())[:3]))
        return f"; the tensors have other names ({stored}, …): give a name map (name_map=, docs/training.md)"

    def _few_bits(
        self, method: QuantizationMethod, module: str, parts: set[str], shape: tuple[int, ...]
    ) -> Tensor | QuantizedWeight:
        """The weight of a module that another library quantized: in its bits, or in floats."""
        if len(shape) != 2:
            raise CheckpointError(
                f"{self._folder}: {module} is quantized, but config.json makes its weight {list(shape)}"
            )
        own, read = (shape[0], shape[1]), lambda part: self._read(f"{module}.{part}")
        packed = None
        try:
            if self._keeps():
                assert self.dtype is not None
                packed = method.as_quantized(read, parts, own, self.dtype)
            weight = method.weight(read, parts, own) if packed is None else None
        except (ValueError, KeyError, StopIteration, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"{self._folder}: the quantized weight of {module}, {list(shape)} by config.json, cannot be read: "
                f"{one_line(error)}"
            ) from error
        self._taken |= {f"{module}.{part}" for part in parts}
        self._quantized.add(module)
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
        names_by_file = {file: set(self._open(file).keys()) for file in files}
        where = {name: file for file, names in names_by_file.items() for name in names}
        if files == [WEIGHTS] or not (self._folder / INDEX).is_file():
            for file, names in names_by_file.items():
                if twice := sorted(name for name in names if where[name] != file):
                    raise CheckpointError(
                        f"{self._folder}: both {file} and {where[twice[0]]} hold {twice[0]!r}, and no index "
                        f"({INDEX}) says which is meant"
                    )
            return where
        indexed = read_index(self._folder / INDEX)
        absent = [name for name, file in indexed.items() if name not in names_by_file[file]]
        for name in absent:
            # Without a config whoever reads the tensors finds out which are missing.
            if self._config is not None and tied_twin(name, self._config) not in where:
                raise CheckpointError(
                    f"{self._folder / INDEX} names {name!r} in {indexed[name]}, which does not hold it"
                )
        return where | {name: file for name, file in indexed.items() if name not in absent}

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
        return read_object(folder / "config.json", ConfigError)
    except ConfigError:
        return {}


def _by_module(names: Iterable[str]) -> dict[str, set[str]]:
    """Module -> the names below it. A name may have a dot of its own: "weight.absmax"."""
    below: dict[str, set[str]] = {}
    for name in names:
        module, dot, inside = name.rpartition(".weight.")
        if not dot:
            module, _, inside = name.rpartition(".")
        below.setdefault(module, set()).add(f"weight.{inside}" if dot else inside)
    return below
