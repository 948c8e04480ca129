"""The tensors of a safetensors folder by stock name, memory-mapped."""

from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from onward.checkpoint import shards
from onward.checkpoint.formats import methods_of, mxfp4, with_settings_file
from onward.checkpoint.formats.settings import QuantizationMethod
from onward.checkpoint.formats.stored import StoredWeight
from onward.checkpoint.stored_names import (
    StackedPart,
    has_stock_names,
    is_cache_scale,
    names_of,
    stacked_part,
    stock_names,
    tied_twin,
)
from onward.errors import CheckpointError, ConfigError, one_line
from onward.models import Architecture
from onward.ops import QuantizedWeight, Weight

# Weight files that an error mentions if a folder has no readable safetensors.
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors", "*.distcp")


class SafetensorsFolder:
    """The tensors of a checkpoint folder by name, as views of the mapped file unless they are converted. It tracks
    which tensors were read.

    dtype: to convert to; None: that of the first tensor read, or with `own_dtypes` each tensor's own. keeps_bits:
    return quantized matrices that the kernels support as `QuantizedWeight`. config: its names are used for the tensors
    (`onward.checkpoint.stored_names`). in_floats: modules whose quantized weights were dequantized. methods: of
    another library's quantization, if config.json describes it."""

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
        self.dtype, self._own_dtypes, self._keeps_bits = dtype, own_dtypes, keeps_bits
        self._folder, self._device, self._config = folder, device, config
        self.in_floats: list[str] = []
        self._order: Tensor | None = None
        self._files: dict[str, Any] = {}
        located = self._locate()
        self._stored = stock_names(located, config)
        self._where = {name: located[stored] for name, stored in self._stored.items()}
        self._consumed: set[str] = set()
        self._consumed_parts: dict[str, set[str]] = {}  # tensor of all experts -> weights read from it
        self.methods = methods_of(with_settings_file(folder, _config_of(folder)))
        self._below = _by_module(self._where) if self.methods is not None else {}
        self._quantized: set[str] = set()  # quantized modules that were read

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Weight:
        """Read the tensor `name` of `shape`, in `dtype` or else the model's, on the model's device."""
        module, _, kind = name.rpartition(".")
        if self.methods is not None and kind == "weight":
            method = self.methods.of(self._stored_module(module))
            if parts := method.parts(self._below.get(module, set())):
                return self._quantized_weight(method, module, parts, shape)
        if name not in self._where:
            if (stacked := stacked_part(name, self._where)) is not None:
                return self._from_stack(name, stacked, shape)
            hint = self._name_map_hint()
            raise CheckpointError(f"{self._folder}: tensor {name!r} of shape {list(shape)} is missing{hint}")
        file, tensor = self._where[name], self._read(name)
        if tuple(tensor.shape) != shape:
            shapes = f"has shape {list(tensor.shape)}, but config.json expects {list(shape)}"
            raise CheckpointError(f"{self._folder / file}: tensor {name!r} {shapes}")
        shards.check_float(self._folder / file, name, tensor.dtype)
        self._consumed.add(name)
        return shards.placed(self._folder, name, tensor, dtype or self._dtype_of(tensor), self._device)

    def all(self) -> dict[str, Tensor]:
        """Every tensor by name, on the model's device, with floats in its dtype."""
        tensors: dict[str, Tensor] = {}
        for name in self._where:
            tensor = self._read(name)
            dtype = self.dtype if tensor.is_floating_point() else None
            tensors[name] = shards.placed(self._folder, name, tensor, dtype, self._device)
        return tensors

    def find(self, name: str) -> Tensor | None:
        return self._read(name) if name in self._where else None

    def unread(self) -> list[str]:
        """Names that were not read, without tensors that have no effect (`onward.checkpoint.stored_names`)."""
        names = sorted(set(self._where) - self._consumed)
        if self.methods is None:
            return names
        return [name for name in names if not (is_cache_scale(name) or self._is_zero_bias(name))]

    def named(self) -> dict[str, Tensor]:
        """Every stored tensor, mapped, by its name in the files."""
        return {stored: self._read(name) for name, stored in self._stored.items()}

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The dtype for a weight without one of its own."""
        if self.dtype is None and self._own_dtypes:
            return tensor.dtype
        self.dtype = self.dtype or tensor.dtype
        return self.dtype

    def _is_zero_bias(self, name: str) -> bool:
        """Whether this is an all-zero bias of a quantized module: AutoGPTQ wrote them for modules without a bias."""
        module, _, kind = name.rpartition(".")
        return kind == "bias" and module in self._quantized and not bool(self._read(name).any())

    def _stored_module(self, module: str) -> str:
        """The module's name in the files, which the rules in config.json refer to."""
        inside = min(self._below.get(module, ()), default=None)
        return module if inside is None else self._stored[f"{module}.{inside}"].removesuffix(f".{inside}")

    def _name_map_hint(self) -> str:
        names = names_of(self._config)
        if names is None or has_stock_names(self._where, names):
            return ""
        stored = ", ".join(map(repr, sorted(self._stored.values())[:3]))
        return f"; the tensors have other names ({stored}, …): give a name map (name_map=, docs/training.md)"

    def _quantized_weight(
        self, method: QuantizationMethod, module: str, parts: Set[str], shape: tuple[int, ...]
    ) -> Tensor | QuantizedWeight:
        """The weight of a module that another library quantized."""
        if len(shape) != 2:
            raise CheckpointError(f"{self._folder}: {module} is quantized, but config.json expects {list(shape)}")
        try:
            stored = method.decode(lambda part: self._read(f"{module}.{part}"), parts, (shape[0], shape[1]))
            weight = self._weight(f"{module}.weight", stored)
        except (ValueError, KeyError, StopIteration, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"{self._folder}: the quantized weight of {module} ({list(shape)} by config.json) cannot be read: "
                f"{one_line(error)}"
            ) from error
        self._consumed |= {f"{module}.{part}" for part in parts}
        self._quantized.add(module)
        return weight

    def _weight(self, name: str, stored: StoredWeight) -> Tensor | QuantizedWeight:
        """A quantized weight: packed if possible, or else dequantized."""
        # float32 requires exact products, and only the CPU has kernels for packed weights.
        if self._keeps_bits and self.dtype not in (None, torch.float32) and self._device.type == "cpu":
            assert self.dtype is not None
            if (packed := stored.packed(self.dtype)) is not None:
                if packed.order is None:
                    return packed
                # Weights of the same inputs are read in sequence and often share an order: they then share one tensor.
                if self._order is None or not torch.equal(self._order, packed.order):
                    self._order = packed.order
                return packed.in_order(self._order)
        self.in_floats.append(name.removesuffix(".weight"))
        return shards.placed(self._folder, name, stored.values().contiguous(), self.dtype, self._device)

    def _from_stack(self, name: str, part: StackedPart, shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
        stored, first = [self._read(tensor) for tensor in part.tensors], part.tensors[0]
        weight: Tensor | QuantizedWeight
        file = self._folder / self._where[first]
        try:
            own = [part.of(values) for values in stored]
            if len(own) == 2:
                read = dict(zip(("blocks", "scales"), own, strict=True)).__getitem__
                weight = self._weight(name, mxfp4.decode(read, set(), (shape[0], shape[1])))
            elif tuple(own[0].shape) != shape:
                raise ValueError(f"its part has shape {list(own[0].shape)}")
            else:
                shards.check_float(file, first, own[0].dtype)
                weight = shards.placed(self._folder, name, own[0], self._dtype_of(own[0]), self._device)
        except (ValueError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"{file}: tensor {first!r} {list(stored[0].shape)} must hold {name!r} ({list(shape)} by config.json): "
                f"{one_line(error)}"
            ) from error
        for tensor, values in zip(part.tensors, stored, strict=True):
            names = self._consumed_parts.setdefault(tensor, set())
            names.add(name)
            if len(names) == part.count(values):
                self._consumed.add(tensor)
        return weight

    def _read(self, name: str) -> Tensor:
        if name not in self._where:
            raise CheckpointError(f"{self._folder}: tensor {name!r} is missing from the weights")
        file = self._where[name]
        try:
            tensor: Tensor = self._open(file).get_tensor(self._stored[name])
        except (SafetensorError, RuntimeError, ValueError, MemoryError) as error:
            path = self._folder / file
            raise CheckpointError(f"{path}: tensor {name!r} cannot be read: {one_line(error)}") from error
        return tensor

    def _locate(self) -> dict[str, str]:
        """Tensor -> file: from the index, and from the files themselves for tensors that it does not list."""
        files = shards.weight_files(self._folder)
        if not files:
            others = sorted(file.name for pattern in _OTHER_FORMATS for file in self._folder.glob(pattern))
            hint = f"; it holds {', '.join(others[:3])}: save the model as safetensors first" if others else ""
            if others and all(file.endswith(".distcp") for file in others):
                hint = f"; it holds {others[0]} and no .metadata, which is written last: the save did not finish"
            raise CheckpointError(f"{self._folder} has no weights: neither {shards.WEIGHTS} nor {shards.INDEX}{hint}")
        names_by_file = {file: set(self._open(file).keys()) for file in files}
        where = {name: file for file, names in names_by_file.items() for name in names}
        if files == [shards.WEIGHTS] or not (self._folder / shards.INDEX).is_file():
            for file, names in names_by_file.items():
                if twice := sorted(name for name in names if where[name] != file):
                    both = f"{file} and {where[twice[0]]}"
                    raise CheckpointError(
                        f"{self._folder}: both {both} hold {twice[0]!r}, and there is no {shards.INDEX}"
                    )
            return where
        indexed = shards.read_index(self._folder / shards.INDEX)
        absent = [name for name, file in indexed.items() if name not in names_by_file[file]]
        for name in absent:
            # Without a config, the reader of the tensors finds out which are missing.
            if self._config is not None and tied_twin(name, self._config) not in where:
                raise CheckpointError(
                    f"{self._folder / shards.INDEX} lists {name!r} in {indexed[name]}, where it is missing"
                )
        return where | {name: file for name, file in indexed.items() if name not in absent}

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            if not shards.is_there(path):
                raise CheckpointError(f"{path} is missing, though the index lists it: download or save it again")
            self._files[file] = shards.open_safetensors(path)
        return self._files[file]


def _config_of(folder: Path) -> Mapping[str, Any]:
    """The folder's config.json, or {} if it cannot be read: the reader of the whole config reports that error."""
    try:
        return shards.read_object(folder / "config.json", ConfigError)
    except ConfigError:
        return {}


def _by_module(names: Iterable[str]) -> dict[str, set[str]]:
    """Module -> the names below it, some with a dot: "weight.absmax"."""
    below: dict[str, set[str]] = {}
    for name in names:
        module, dot, inside = name.rpartition(".weight.")
        if not dot:
            module, _, inside = name.rpartition(".")
        below.setdefault(module, set()).add(f"weight.{inside}" if dot else inside)
    return below
