"""Weights in the cache folder: a checkpoint that `load` has quantized or packed is read from there afterwards.

A copy is a folder whose name is a hash of its bytes, and a link to it has the identity of the checkpoint's files and of
the options that they were read with (`checkpoint_identity`): names, sizes, times and inodes find a copy, so that no
weight is hashed on the way to the first token. Equal copies of two checkpoints are one. A copy is made from weights
that nobody else has seen, before `load` returns; a thread then hashes it, makes it durable and gives it its name.
Decoding from the small pages of a mapped file takes 15 % longer (benchmarks/LOG.md). So a copy is mapped where the
system maps files in huge pages, and elsewhere read into huge pages, which takes as long as packing: floats have a copy
only where it is mapped.
"""

import hashlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.checkpoint import read_weights
from onward.checkpoint.quantized_folder import read_manifest, write_copy
from onward.checkpoint.shards import WEIGHTS, read_object, weight_files
from onward.errors import CheckpointError, ConfigError, RequestError, one_line, warn_once
from onward.language_model.prefix_disk import checkpoint_identity
from onward.models import Architecture, ExpertLinear, marked_parts
from onward.native.machine import cache_in_huge_pages, default_threads, has_huge_pages
from onward.ops.operator import usable_library
from onward.util.files import flush
from onward.util.process import lower_priority

_log = logging.getLogger(__name__)

MIN_NBYTES = 64 << 20  # of a checkpoint; a smaller one is quantized or packed in a fraction of a second
MAX_NBYTES = 16 << 30  # of all copies
_PART = 8 << 20
_ABANDONED_S = 600.0  # a copy that is still being written is younger


def cache_folder() -> Path | None:
    """ONWARD_CACHE_DIR, by default the user's cache folder; None if the variable is empty."""
    chosen = os.environ.get("ONWARD_CACHE_DIR")
    if chosen is not None:
        return Path(chosen).expanduser().absolute() if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "onward"


class WeightsCopy:
    """The copy of one checkpoint in the cache folder, read with the same options.

    folder: of the copies. places, options: as `checkpoint_identity` takes them; the first option is the format that the
    weights are quantized to, or None. identity: theirs.
    """

    def __init__(self, folder: Path, places: Sequence[Path], options: Sequence[object], identity: str) -> None:
        self._folder, self._places, self._options, self._identity = folder, places, options, identity

    @classmethod
    def of(
        cls, checkpoint: Path, places: Sequence[Path], quantize: str | None, *options: object
    ) -> "WeightsCopy | None":
        """That of a checkpoint folder; None if its weights are small, if they have just changed, or without kernels or
        a cache folder. quantize: the format to quantize to."""
        folder = cache_folder()
        if folder is None or usable_library() is None:
            return None
        with suppress(OSError, CheckpointError):
            if sum((checkpoint / file).stat().st_size for file in weight_files(checkpoint)) < MIN_NBYTES:
                return None
        options = (quantize, *options)
        identity = checkpoint_identity(places, *options)
        return None if identity is None else cls(folder / "weights", places, options, identity)

    def read(self, architecture: Architecture) -> Any:
        """The params, with all that `pack_params` does not pack again; None if there is no copy."""
        try:
            place = (self._folder / self._identity).resolve(strict=True)
            if not (_is_private(self._folder) and _is_private(place)):
                return None
            manifest = read_manifest(place, read_object(place / "config.json", ConfigError), of_copy=True)
            if manifest is None:
                raise ConfigError(f"{place} has no manifest")
            device = torch.device("cpu")
            params = read_weights(place, architecture, dtype=None, device=device, manifest=manifest, mapped=False)
            os.utime(place)
        except (CheckpointError, ConfigError) as error:
            _log.warning("stored weights are damaged, and deleted: %s", error)
            shutil.rmtree(place, ignore_errors=True)
            return None
        except OSError:
            return None
        return params

    def write(self, architecture: Architecture, params: Any) -> None:
        """Write a copy of params that nobody changes until this returns, if there is room for it."""
        leaves = {id(leaf): leaf for leaf in pytree.tree_leaves(params) if isinstance(leaf, Tensor)}
        nbytes = sum(leaf.nbytes for leaf in leaves.values())
        if nbytes > MAX_NBYTES:
            return
        # Experts are stacked after they are read, which is another copy.
        has_experts = any(isinstance(part, ExpertLinear) for part in marked_parts(params))
        if has_experts or self._identity != checkpoint_identity(self._places, *self._options):
            return
        temporary = self._folder / f".{secrets.token_hex(8)}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(self._folder):
                raise OSError("it belongs to another user, or others can write to it")
            if self._options[0] is None and not has_huge_pages(self._folder):
                return
            if shutil.disk_usage(self._folder).free < 2 * nbytes:
                raise OSError(f"less than {2 * nbytes >> 20:,} MiB are free")
            temporary.mkdir(mode=0o700)
            write_copy(architecture, params, temporary)
        except (OSError, RequestError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                problem = f"the weights cannot be stored in {self._folder} for the next load ({one_line(error)})"
                if self._options[0] is None:  # packed again in a second
                    _log.info("%s", problem)
                else:
                    warn_once(f"{problem}: set ONWARD_CACHE_DIR to another folder, or to an empty text to store none")
            return
        # The pool begins here: a thread starts no other once the interpreter ends.
        hashes = _hashes_of(temporary / WEIGHTS)
        threading.Thread(target=self._publish, args=(temporary, hashes), name="onward-weights-copy").start()

    def _publish(self, temporary: Path, hashes: Iterator[bytes]) -> None:
        """Make a complete copy durable, and give it its name and link. hashes: of its weights."""
        lower_priority()
        try:
            manifest, weights = temporary / "config.json", temporary / WEIGHTS
            place = self._folder / hashlib.sha256(manifest.read_bytes() + b"".join(hashes)).hexdigest()
            if place.exists():
                os.utime(place)
            else:
                for path in (weights, manifest, temporary):
                    flush(path)
                cache_in_huge_pages(weights)
                temporary.rename(place)
            link = self._folder / f".{secrets.token_hex(8)}"
            link.symlink_to(place.name)
            link.replace(self._folder / self._identity)
            _make_room(self._folder, place)
        except OSError as error:
            _log.warning("weights were not stored in %s: %s", self._folder, one_line(error))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _hashes_of(file: Path) -> Iterator[bytes]:
    """The SHA-256 of each part of a file, by several threads that start at once."""

    def hash_from(start: int) -> bytes:
        with file.open("rb", buffering=0) as opened:
            return hashlib.sha256(os.pread(opened.fileno(), _PART, start)).digest()

    pool = ThreadPoolExecutor(default_threads()[0], initializer=lower_priority)
    hashes = pool.map(hash_from, range(0, file.stat().st_size, _PART))
    pool.shutdown(wait=False)
    return hashes


def _make_room(folder: Path, newest: Path) -> None:
    """Delete the least recently used copies over the bound, links to nothing, and copies that were not finished."""
    copies = sorted(_copies(folder), key=lambda copy: copy[1])
    over = sum(nbytes for _, _, nbytes in copies) - MAX_NBYTES
    for place, modified, nbytes in copies:
        is_unfinished = place.name.startswith(".")
        if modified < time.time() - _ABANDONED_S if is_unfinished else over > 0 and place != newest:
            shutil.rmtree(place, ignore_errors=True)
            over -= nbytes
    for path in folder.iterdir():
        if path.is_symlink() and not path.exists():
            path.unlink(missing_ok=True)


def _copies(folder: Path) -> Iterator[tuple[Path, float, int]]:
    """(path, last use, bytes) of each copy."""
    for path in folder.iterdir():
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                yield path, path.stat().st_mtime, sum(file.stat().st_size for file in path.iterdir())


def _is_private(folder: Path) -> bool:
    """Whether a folder belongs to this user, and no other one can write to it."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
