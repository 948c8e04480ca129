"""Saved sessions: safetensors files with the ids, their KV cache, and the model's fingerprint.

tokens               int32 [N]
cache.<leaf>         the first N positions of a tensor of the cache: [1, G, N, D] of a `KVCache`; for sliding layers
                     only the last of these, from the first block that the next token sees
__metadata__         onward_session (the format's version), model (a fingerprint), computed_by, capacity, notes,
                     adapter (the digest of the adapter, if any), and sha256 (of everything else)
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache import KVCache
from onward.cache.dense import first_positions, position_dims
from onward.cache.kinds import first_seen
from onward.decoding.pinned_prefix import CacheSnapshot
from onward.errors import SessionError, one_line, warn
from onward.language_model.session_fingerprint import as_bytes, computed_by, difference, fingerprint
from onward.models import Model, padded_length
from onward.util.files import write_whole

MARK = "onward_session"
VERSION = 1
# A new version, so that an older Onward without adapters rejects the file.
VERSION_WITH_ADAPTER = 2
# The canonical form of a whole number; `int` would accept others too.
_WHOLE = re.compile("0|[1-9][0-9]{0,9}")
# The dimension of positions is found by comparing with an empty cache, whose length is the first of these that differs.
_PROBE_LENGTHS = (16, 32)


@dataclass(frozen=True)
class SavedSession:
    """tokens: the ids. snapshot: the cache of their positions, if any. adapter: the digest of the adapter that it was
    computed with, or ""."""

    tokens: list[int]
    snapshot: CacheSnapshot | None
    notes: dict[str, str]
    adapter: str = ""


def save(file: Path, model: Model, session: SavedSession) -> None:
    """Write the file atomically. An existing file is replaced only if it is a saved session."""
    if not _are_strings(session.notes):
        raise SessionError(f"the notes of a session are strings by name; got {session.notes!r}")
    if file.exists():
        _read_header(file, f"{str(file)!r} exists and is not a saved session, choose another name")
    tensors, capacity = _tensors(model, session)
    metadata = {
        MARK: str(VERSION_WITH_ADAPTER if session.adapter else VERSION),
        "model": json.dumps(fingerprint(model)),
        "computed_by": computed_by(model),
        "capacity": str(capacity),
        "notes": json.dumps(session.notes),
    }
    if session.adapter:
        metadata["adapter"] = session.adapter
    metadata["sha256"] = _digest(metadata, tensors)
    try:
        write_whole(file, lambda temporary: save_file(tensors, temporary, metadata))
    except (OSError, ValueError, KeyError, SafetensorError) as error:  # KeyError: a dtype that safetensors lacks
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise SessionError(f"{str(file)!r} cannot be written: {reason}") from error


def load(file: Path, model: Model) -> SavedSession:
    """Read a session of this model. Raises `SessionError` for any other file."""
    metadata, tensors = _read_verified(file)
    try:
        saved_model, notes = json.loads(metadata["model"]), json.loads(metadata["notes"])
        if not _are_strings(notes):
            raise ValueError("its notes are not strings by name")
        tokens, saved_by = _checked_tokens(tensors.pop("tokens"), model.vocab_size), metadata["computed_by"]
        capacity = _checked_capacity(metadata["capacity"], len(tokens) if tensors else 0)
        reason = difference(saved_model, model)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SessionError(f"{str(file)!r} is not a session saved by Onward: {one_line(error)}") from error
    if reason is not None:
        raise SessionError(f"{str(file)!r} is the session of another model: {reason}")
    if model.max_seq_len is not None and len(tokens) > model.max_seq_len:
        raise SessionError(
            f"{str(file)!r} holds {len(tokens)} tokens, but the context is {model.max_seq_len}: load the model with a "
            "larger max_seq_len"
        )
    if (loaded_by := computed_by(model)) != saved_by:
        warn(
            f"{str(file)!r} was computed by {saved_by!r} and continues on {loaded_by!r}, which may round "
            "differently: its tokens can differ from those of a fresh call"
        )
    snapshot = _restored(file, model, tensors, len(tokens), capacity)
    return SavedSession(tokens, snapshot, notes, metadata.get("adapter", ""))


def _are_strings(notes: dict[Any, Any]) -> bool:
    return all(isinstance(text, str) for note in notes.items() for text in note)


def _checked_tokens(tokens: Tensor, vocab_size: int | None) -> list[int]:
    if tokens.dtype != torch.int32 or tokens.dim() != 1:
        raise ValueError(f"its tokens are {tokens.dtype} {list(tokens.shape)} and not int32 [N]")
    ids: list[int] = tokens.tolist()
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        raise ValueError(f"its tokens range from {min(ids)} to {max(ids)}, and the vocabulary has {vocab_size}")
    return ids


def _checked_capacity(text: str, count: int) -> int:
    if not _WHOLE.fullmatch(text) or not count <= int(text) < 2**31:
        raise ValueError(f"its capacity is {text!r}, and its cache holds {count} positions")
    return int(text)


def _tensors(model: Model, session: SavedSession) -> tuple[dict[str, Tensor], int]:
    tensors = {"tokens": torch.tensor(session.tokens, dtype=torch.int32)}
    snapshot, count = session.snapshot, len(session.tokens)
    if snapshot is None or not count:
        return tensors, 0
    leaves = _leaves(snapshot.cache)
    for name, leaf in leaves.items():
        if not isinstance(leaf, Tensor):
            raise SessionError(f"a cache is saved if it is a pytree of tensors; {name} is a {type(leaf).__name__}")
    dims, firsts = _dims(model, snapshot), _firsts(model, snapshot.cache, count)
    for (name, leaf), dim, first in zip(leaves.items(), dims, firsts, strict=True):
        # A copy, since the session may write to its cache again, and two leaves may share memory.
        filled = _from(first, first_positions(leaf, dim, count), dim).detach()
        tensors[name] = filled.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return tensors, snapshot.capacity


def _restored(
    file: Path, model: Model, tensors: Mapping[str, Tensor], count: int, capacity: int
) -> CacheSnapshot | None:
    if not tensors:
        return None
    snapshot = CacheSnapshot(model.new_cache(1, length := padded_length(count, model)), length)
    if None in _dims(model, snapshot) and length != capacity:
        # A tensor that was saved whole is as long as its cache was.
        try:
            snapshot = CacheSnapshot(model.new_cache(1, capacity), capacity)
        except (RuntimeError, MemoryError) as error:
            raise SessionError(
                f"{str(file)!r} needs a cache for {capacity} positions, which cannot be made: {one_line(error)[:200]}"
            ) from error
    leaves, dims = _leaves(snapshot.cache), _dims(model, snapshot)
    if leaves.keys() != tensors.keys():
        raise SessionError(f"{str(file)!r} holds a cache of other tensors than this model's")
    for (name, leaf), dim, first in zip(leaves.items(), dims, _firsts(model, snapshot.cache, count), strict=True):
        target = first_positions(leaf, dim, count)
        if target.shape != tensors[name].shape:  # older files have all positions of sliding layers
            target = _from(first, target, dim)
        if (target.shape, target.dtype) != (tensors[name].shape, tensors[name].dtype):
            raise SessionError(
                f"{str(file)!r}: {name} is {tensors[name].dtype} {list(tensors[name].shape)}, but this model's cache "
                f"has {target.dtype} {list(target.shape)}"
            )
        target.copy_(tensors[name])
    return snapshot


def _leaves(cache: Any) -> dict[str, Any]:
    return {f"cache{pytree.keystr(path)}": leaf for path, leaf in pytree.tree_flatten_with_path(cache)[0]}


def _dims(model: Model, snapshot: CacheSnapshot) -> list[int | None]:
    """The dimension of positions in each tensor; None for a tensor that is stored whole."""
    length = next(length for length in _PROBE_LENGTHS if length != snapshot.capacity)
    dims = position_dims(snapshot.cache, snapshot.capacity, model.new_cache(1, length), length)
    return [None] * len(pytree.tree_leaves(snapshot.cache)) if dims is None else dims


def _firsts(model: Model, cache: Any, count: int) -> list[int]:
    """The first stored position of each tensor: above 0 only for the sliding layers of a `KVCache`."""
    leaves = len(pytree.tree_leaves(cache))
    blocks = None if model.new_blocks is None else model.new_blocks(1)
    if not isinstance(cache, KVCache) or blocks is None or blocks.windows is None:
        return [0] * leaves
    first = first_seen(blocks.windows.window, count)
    layer_firsts = [0 if shape.window is None else first for shape in blocks.shapes] * 2  # of keys, then of values
    return layer_firsts + [0] * (leaves - len(layer_firsts))


def _from(first: int, tensor: Tensor, dim: int | None) -> Tensor:
    """A view of a tensor from position `first` on. dim: None for a tensor without positions."""
    return tensor if dim is None else tensor.narrow(dim, first, tensor.shape[dim] - first)


def _read_verified(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    metadata = _read_header(file, f"{str(file)!r} is not a saved session or is damaged")
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, RuntimeError, ValueError, MemoryError) as error:
        raise SessionError(f"{str(file)!r} cannot be read: {one_line(error)}") from error
    if _digest(metadata, tensors) != metadata.get("sha256"):
        raise SessionError(f"{str(file)!r} is damaged: its checksum does not match")
    return metadata, tensors


def _read_header(file: Path, message: str) -> dict[str, str]:
    """The metadata of a session of a known format. `message` begins the error for other files."""
    if file.is_dir():
        raise SessionError(f"{str(file)!r} is a folder, but a session is a file: choose another name")
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            metadata: dict[str, str] = content.metadata() or {}
    except OSError as error:
        raise SessionError(f"{str(file)!r} cannot be read: {error.strerror or one_line(error)}") from error
    except (SafetensorError, ValueError, MemoryError) as error:
        raise SessionError(f"{message}: {one_line(error)}") from error
    version = metadata.get(MARK)
    if version is None:
        raise SessionError(f"{message}: it is a safetensors file of something else")
    if version not in (str(VERSION), str(VERSION_WITH_ADAPTER)):
        raise SessionError(
            f"{str(file)!r} is a session of format {version}, but this Onward reads formats {VERSION} and "
            f"{VERSION_WITH_ADAPTER}: upgrade it"
        )
    return metadata


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    described = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    rest = {key: value for key, value in metadata.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps([rest, described], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(as_bytes(tensors[name]))
    return digest.hexdigest()
