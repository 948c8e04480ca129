"""Read weights from safetensors, one file or an index of shards. They are mapped: memory holds the file's own pages."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from onward.checkpoint.distributed import DistributedFolder, NameMapSource, is_distributed
from onward.checkpoint.placing import check_float, placed
from onward.checkpoint.quantizers import method_of
from onward.checkpoint.shards import INDEX, WEIGHTS, is_there, open_safetensors, read_index, weight_files
from onward.errors import CheckpointError, RequestError, one_line
from onward.models import Architecture, Scope
from onward.models.architecture import is_unread

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

    dtype: to convert to; None: that of the first tensor taken.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None, device: torch.device) -> None:
        self.dtype = dtype
        self._folder = folder
        self._device = device
        self._files: dict[str, Any] = {}
        located = self._locate()
        self._stored = {_renamed(name): name for name in located}
        self._where = {_renamed(name): file for name, file in located.items()}
        self._taken: set[str] = set()
        self._method = method_of(_config_of(folder))
        self._below = _by_module(self._where) if self._method is not None else {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, of `shape`, in `dtype`, or the model's, on the wanted device.

        Raises:
            CheckpointError: it is absent, has another shape, is no float, or is too large for float16.
        """
        module, _, kind = name.rpartition(".")
        parts = (
            set() if self._method is None or kind != "weight" else self._method.parts(self._below.get(module, set()))
        )
        if parts:
            return self._dequantized(module, parts, shape)
        if name not in self._where:
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
            dtype = self.dtype = self.dtype or tensor.dtype
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

    def _dequantized(self, module: str, parts: set[str], shape: tuple[int, ...]) -> Tensor:
        """The weight of a module that another library quantized, in floats."""
        assert self._method is not None
        if len(shape) != 2:
            raise CheckpointError(
                f"{self._folder}: {module} is quantized, but config.json makes its weight {list(shape)}"
            )
        try:
            weight = self._method.weight(lambda part: self._read(f"{module}.{part}"), parts, (shape[0], shape[1]))
        except (ValueError, KeyError, StopIteration, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"{self._folder}: the quantized weight of {module}, {list(shape)} by config.json, cannot be read: "
                f"{one_line(error)}"
            ) from error
        self._taken |= {f"{module}.{part}" for part in parts}
        return placed(self._folder, f"{module}.weight", weight.contiguous(), self.dtype, self._device)

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


def read_weights(
    folder: Path,
    config: Architecture,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    name_map: NameMapSource = None,
    each_layer: Callable[[Any], Any] = lambda layer: layer,
) -> Any:
    """All weights of a model. Every tensor of the folder must be one of them.

    Args:
        folder: holds model.safetensors, or an index and its shards, or a torch.distributed.checkpoint.
        config: says which weights there are, and of which shapes.
        dtype: to convert to; None keeps that of the tensor which is taken first, for all tensors.
        device: where they go.
        name_map: from the names of a torch.distributed.checkpoint to Hugging Face's (`onward.checkpoint.name_map`).
        each_layer: converts each layer (packs it, say) as soon as it is read.

    Raises:
        CheckpointError: a tensor is missing, mis-shaped or damaged, or is none of the architecture's weights.
        RequestError: there is a name map, but safetensors have Hugging Face's names.
    """
    tensors: SafetensorsFolder | DistributedFolder
    if is_distributed(folder):
        tensors = DistributedFolder(folder, config, dtype, device, name_map)
    elif name_map is None:
        tensors = SafetensorsFolder(folder, dtype, device)
    else:
        raise RequestError(f"a name map is for a torch.distributed.checkpoint folder, and {folder} is none")
    params = config.read(Scope(tensors), each_layer)
    _check_left(folder, config, tensors, params)
    return params


def _check_left(
    folder: Path, config: Architecture, tensors: SafetensorsFolder | DistributedFolder, params: Any
) -> None:
    """Raise if a tensor was not taken: config.json and the weights are then of different models."""
    # Old checkpoints carry the rotary frequencies, which config.json determines.
    left = [name for name in tensors.left() if not (name.endswith("rotary_emb.inv_freq") or is_unread(config, name))]
    if left == ["lm_head.weight"]:
        embedding = params.embed_tokens.weight
        assert isinstance(embedding, Tensor), "stock weights are read as they are"
        head = tensors.take("lm_head.weight", tuple(embedding.shape))
        if not torch.equal(head, embedding):
            raise CheckpointError(
                f"{folder}: config.json ties the head to the embedding, but lm_head.weight differs from it: "
                "set tie_word_embeddings to false, or remove the tensor"
            )
    elif left:
        advice = ": is it the config of this checkpoint?"
        if isinstance(tensors, DistributedFolder):
            advice = (
                ": leave training state out by the name map, as in "
                f"{json.dumps({left[0]: None})}, or is config.json of another checkpoint?{tensors.proposal()}"
            )
        raise CheckpointError(
            f"{folder}: the weights hold {len(left)} tensors that config.json leaves no place for, "
            f"{left[0]!r} for one{advice}"
        )
