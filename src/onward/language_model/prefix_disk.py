"""The prefix cache on disk of a language model: which store its present weights have.

A store's key names everything that keys and values depend on besides ids, adapter and salt: the config and all bytes of
the weights, the format of the cache, the build, the instruction set, the backend and torch. To hash 1 GB of weights
takes about a second, so this is done in the background, and the folder remembers the hash for a checkpoint whose files
(name, size, times, inode) are the same. Until it is known, nothing is read from the disk or written.
"""

import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from onward.cache.disk import MAX_QUEUED, CurrentStore
from onward.errors import OptionError, one_line, warn
from onward.language_model.fingerprint import build, computed_by, model_fingerprint, reading_build
from onward.models import Model
from onward.models.model import computation
from onward.ops.heads import BLOCK
from onward.prefix_store import PrefixStore
from onward.util.checks import check_whole
from onward.util.files import write_whole
from onward.util.process import lower_priority, renew_in_forks

DEFAULT_NBYTES = 16 * 2**30
# Weights of up to this size, in bytes, are hashed at once.
_SMALL = 64 << 20
# Seconds. A file that changed this shortly before it was read may have changed again within the same tick of its clock.
_RECENT = 2.0
_MAX_FILES = 10_000


class PrefixDisk:
    """Opens the store for the present weights of one model.

    folder: of the stores; created if it is absent. max_bytes: the most that they take together. backend: that runs the
    model.

    Raises:
        OptionError: the folder cannot be created, or the size is not a whole number above 0.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | None, backend: str) -> None:
        self.max_bytes = DEFAULT_NBYTES if max_bytes is None else max_bytes
        self._backend = backend
        check_whole("prefix_cache_disk", self.max_bytes, low=1)
        if not isinstance(folder, str | os.PathLike):
            raise OptionError("prefix_cache_dir", f"must be a folder; got {folder!r}")
        self.folder = Path(os.path.expanduser(folder)).absolute()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError("prefix_cache_dir", f"{str(folder)!r} cannot be created: {one_line(error)}") from error
        self._source: tuple[object, str] | None = None
        self._name = ""
        self._forget()
        renew_in_forks(self)

    @classmethod
    def of(
        cls, model: Model, backend: str, folder: str | os.PathLike[str] | None, max_bytes: int | None
    ) -> "PrefixDisk | None":
        """That of a model, as `LanguageModel` takes its arguments. Raises `OptionError` as the class, and for a model
        whose cache is not in blocks."""
        if folder is None:
            if max_bytes is not None:
                raise OptionError("prefix_cache_disk", "would change nothing without a prefix_cache_dir: set that too")
            return None
        if model.new_blocks is None:
            raise OptionError(
                "prefix_cache_dir",
                "needs a model whose cache is in blocks, and this model has a cache of its own (Model.new_blocks is "
                "None): leave it out",
            )
        return cls(folder, max_bytes, backend)

    @property
    def arguments(self) -> tuple[Path, int]:
        """Those of `LanguageModel`."""
        return self.folder, self.max_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy opens its own stores."""
        return type(self), (*self.arguments, self._backend)

    def renew(self) -> None:
        """In a forked child: open the stores again."""
        self._forget()

    def _forget(self) -> None:
        self._lock, self._version = threading.Lock(), object()
        self._current: CurrentStore | None = None

    def read_from(self, model: Model, identity: str | None, name: str) -> None:
        """The weights of a model were read from a checkpoint (`checkpoint_identity`). Opens the store or begins to."""
        self._name = name
        version = computation(model)
        self._source = None if identity is None else (version, identity)
        self(model, version)

    def __call__(self, model: Model, version: object) -> CurrentStore | None:
        """The store of a model with its present weights, whose `computation` is `version`; None while it is unknown."""
        with self._lock:
            if version == self._version:
                return self._current
            self._version, self._current = version, None
            weights = self._remembered(version)
            if weights is not None or model.nbytes <= _SMALL:
                self._open(model, version, weights)
            else:
                arguments = model, version
                threading.Thread(target=self._hash, args=arguments, name="onward-weights-hash", daemon=True).start()
            return self._current

    def _hash(self, model: Model, version: object) -> None:
        """Hash the weights in a thread, and open the store unless they have changed meanwhile."""
        lower_priority()
        with suppress(Exception):  # weights that change while they are read
            weights = _hash_of_weights(model)
            with self._lock:
                if version is self._version and version == computation(model):
                    self._open(model, version, weights)

    def _open(self, model: Model, version: object, weights: str | None) -> None:
        if weights is None:
            weights = _hash_of_weights(model)
        if weights:
            self._remember(version, weights)
            key = key_of(model, self._backend, weights)
            store = PrefixStore(
                self.folder, key, max_bytes=self.max_bytes, model=self._name, queue_bytes=2 * MAX_QUEUED
            )
            self._current = CurrentStore(store, lambda: computation(model) == version)

    # ── hashes of checkpoints ──

    def _memory(self, version: object) -> Path | None:
        """The file with the hash of the weights, if they were read from a checkpoint and have not changed since."""
        if self._source is None or self._source[0] != version:
            return None
        return self.folder / "weights" / self._source[1]

    def _remembered(self, version: object) -> str | None:
        file = self._memory(version)
        with suppress(OSError, ValueError):
            if file is not None and len(text := file.read_text()) == 64:
                return text
        return None

    def _remember(self, version: object, weights: str) -> None:
        file = self._memory(version)
        if file is not None and not file.exists():
            with suppress(OSError):
                file.parent.mkdir(mode=0o700, exist_ok=True)
                write_whole(file, lambda temporary: temporary.write_text(weights))


def key_of(model: Model, backend: str, weights: str) -> str:
    """The key of a store. weights: from `_hash_of_weights`."""
    assert model.new_blocks is not None, "checked by LanguageModel"
    plan = model.new_blocks(1).plan
    *_, autocast = computation(model)
    parts = (
        weights, computed_by(model), platform.machine(), build(), torch.__version__, backend, str(autocast),
        torch.backends.cpu.get_cpu_capability(),  # of the code that torch.compile makes
        str((plan.shapes, plan.states, plan.dtype, plan.rows.name, BLOCK)),
    )  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _hash_of_weights(model: Model) -> str:
    """A hash of a model's config and weights; "" for weights in a layout whose bytes are unknown."""
    described = model_fingerprint(model)
    if any(weight.endswith("?") for weight in described["weights"].values()):
        warn("prefix_cache_dir has no effect for this model: the bytes of its weights cannot be read")
        return ""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def checkpoint_identity(places: Iterable[Path], *options: object) -> str | None:
    """A text that names the files of a checkpoint as they are now, and how they are read; None if a file changed just
    now. Take it before the files are read and again afterwards, and use it if both are equal.

    places: folders, or files, of which each stands for all files of its folder with the same suffix.
    """
    entries: list[object] = []
    for place in places:
        files = place.rglob("*") if place.is_dir() else place.parent.glob(f"*{place.suffix}")
        for file in sorted(files):
            status = file.stat()  # of the target of a link
            if max(status.st_mtime, status.st_ctime) > time.time() - _RECENT or len(entries) > _MAX_FILES:
                return None
            if file.is_file():
                numbers = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
                entries.append((str(file.absolute()), *numbers))
    text = json.dumps([entries, [str(option) for option in options], reading_build(), torch.__version__])
    return hashlib.sha256(text.encode()).hexdigest()
