"""Models on demand: those of a folder, and when they are in memory."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.checkpoint.gguf import parts_of
from onward.engine import Engine
from onward.errors import RequestError
from onward.native.machine import memory_limit
from onward.util.checks import check_whole, is_number
from onward.util.option_names import checks_option_names

# Loads a model: its name, its file or folder, and a function for the loaded fraction. Returns its engine, and variables
# of its chat template.
Open = Callable[[str, Path, Callable[[float], None]], tuple[Engine, Mapping[str, Any]]]
# The default share of the machine's memory for all models.
_MEMORY_SHARE = 0.75
_WEIGHTS = (".safetensors", ".gguf", ".distcp")


@dataclass(frozen=True)
class ModelFile:
    """A model on disk. path: a folder or a GGUF file. nbytes: of its weights. modified: the latest change of its files,
    in nanoseconds since 1970."""

    path: Path
    nbytes: int
    modified: int

    @property
    def created(self) -> int:
        """Seconds since 1970."""
        return self.modified // 1_000_000_000

    def current(self) -> "ModelFile":
        """The same model as it is on disk now."""
        return _model(self.path)

    def has_changed(self) -> bool:
        return self.current() != self


def models_in(folder: Path) -> dict[str, ModelFile]:
    """The models of a folder: each folder in it with a config.json or a GGUF file, and each GGUF file, whose name is
    without ".gguf" and the number of its part. Names that begin with a dot are left out.

    Raises:
        RequestError: the folder cannot be read.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise RequestError(f"the folder of models {str(folder)!r} cannot be read: {error.strerror}") from error
    models: dict[str, ModelFile] = {}
    for path in entries:
        if path.name.startswith(".") or not path.name.isprintable():
            continue
        if path.is_dir():
            if (path / "config.json").is_file() or any(path.glob("*.gguf")):
                models[path.name] = _model(path)
        elif path.suffix == ".gguf" and path.is_file() and parts_of(path.name)[0] == path.name:
            name = path.stem.partition("-00001-of-")[0]
            models[path.name if name in models else name] = _model(path)
    return models


def _model(path: Path) -> ModelFile:
    files = list(path.iterdir()) if path.is_dir() else [path.with_name(name) for name in parts_of(path.name)]
    nbytes = modified = 0
    for file in files:
        try:
            stat = file.stat()
        except OSError:  # a broken link
            continue
        modified = max(modified, stat.st_mtime_ns)
        nbytes += stat.st_size if file.suffix in _WEIGHTS else 0
    return ModelFile(path, nbytes, modified)


@checks_option_names
@dataclass(frozen=True, kw_only=True)
class OnDemand:
    """Models that are loaded when requests name them.

    folder: each folder in it with a checkpoint, and each GGUF file, is a model of that name (docs/serving.md).
    open: loads a model. It gets the name, the path and a function that it may call with the loaded fraction, and
        returns an engine and the variables of the chat template. It runs in a thread, for one model at a time.
    max_models: the most that are loaded at once, besides those that are always loaded.
    memory: bytes of the weights and caches of all models, including those that are always loaded; by default three
        quarters of the machine's. A model that is too large is loaded alone.
    cache_memory, weight_ratio: bytes of the KV cache of each, and the bytes of its weights in memory for each on disk,
        to estimate the size of a model that has not been loaded yet.
    ttl: seconds without a request after which a model is unloaded; math.inf for never.
    wait: seconds that a request waits until other models have made room.

    Raises:
        RequestError: a value outside its range, or no such folder.
    """

    folder: Path
    open: Open
    max_models: int = 4
    memory: int | None = None
    cache_memory: int = 0
    weight_ratio: float = 1.0
    ttl: float = 3600.0
    wait: float = 120.0

    def __post_init__(self) -> None:
        check_whole("max_models", self.max_models, low=1)
        check_whole("cache_memory", self.cache_memory, low=0)
        if self.memory is not None:
            check_whole("memory", self.memory, low=1)
        for name in ("ttl", "wait", "weight_ratio"):
            value = getattr(self, name)
            if not is_number(value) or math.isnan(value) or value < 0:
                raise RequestError(f"{name} must be a number of 0 or more; got {value!r}")
        models_in(self.folder)  # checks it

    @property
    def bytes_allowed(self) -> int:
        return int(_MEMORY_SHARE * memory_limit()) if self.memory is None else self.memory
