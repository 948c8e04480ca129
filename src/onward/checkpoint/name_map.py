"""A name map: a small JSON object that maps a trainer's weight names to those of Hugging Face checkpoints.

    "tok_embeddings.weight": "model.embed_tokens.weight"      a name
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_…"     `{}` matches one part between dots
    "layers.{}.wqkv.weight": ["…q_proj.weight", "…k_proj.weight", "…v_proj.weight"]   the rows of several, in order
    "layers.{}.wq.weight": {"to": "…q_proj.weight", "rope": "interleaved"}   RoPE rotates pairs of adjacent rows
    "app.model.": ""                                          a prefix (ending with a dot), replaced
    "ema.": null, "step_count": null                          excluded: all names with this prefix; this name

The longest matching prefix is replaced first, then the whole name is looked up. Names without an entry are unchanged.
`MappedTensors` reads tensors by such a map: whole ones, or rows of larger ones.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onward.checkpoint.shards import check_float, placed, read_object
from onward.checkpoint.stored_names import WRAPPERS, tied_twin
from onward.errors import CheckpointError, ConfigError, RequestError
from onward.models import Architecture, parameter_shapes

FILE = "name_map.json"
WILDCARD = "{}"


class Target(NamedTuple):
    """A tensor under Hugging Face's names: the weights whose rows it holds, in order (usually one), and whether RoPE
    rotates pairs of adjacent rows in queries and keys (Meta's layout) instead of halves (Hugging Face's)."""

    names: tuple[str, ...]
    interleaved: bool = False


class NameMap:
    """A validated name map. `where` identifies it in errors (`ConfigError`)."""

    def __init__(self, entries: Mapping[str, Any], where: str) -> None:
        self.entries = dict(entries)
        self._where = where
        self._prefixes: dict[str, str | None] = {}
        self._names: dict[tuple[str, ...], Target | None] = {}
        for name, value in entries.items():
            if not isinstance(name, str):
                raise ConfigError(f"{where}: a name must be text; got {name!r}")
            if name == "" or name.endswith("."):
                self._prefixes[name] = self._checked_prefix(name, value)
            else:
                self._names[tuple(name.split("."))] = self._checked_target(name, value)

    @classmethod
    def of(cls, source: "str | os.PathLike[str] | Mapping[str, Any] | None", folder: Path) -> "NameMap":
        """Read a name map from a JSON file or a mapping; None uses the folder's name_map.json, if any."""
        if source is None:
            file = folder / FILE
            return cls(read_object(file, ConfigError, "the name map "), str(file)) if file.is_file() else cls({}, FILE)
        if isinstance(source, Mapping):
            return cls(source, "name_map")
        if not isinstance(source, str | os.PathLike):
            raise RequestError(f"name_map must be a JSON file or a mapping; got {type(source).__name__}")
        return cls(read_object(Path(source).expanduser(), ConfigError, "the name map "), str(source))

    def __call__(self, name: str) -> Target | None:
        """The target of the tensor with this name; None if it is excluded."""
        name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        prefix = max((prefix for prefix in self._prefixes if name.startswith(prefix)), key=len, default=None)
        if prefix is not None:
            replacement = self._prefixes[prefix]
            if replacement is None:
                return None
            name = replacement + name[len(prefix) :]
        parts = tuple(name.split("."))
        # The entry with the fewest wildcards wins.
        for pattern in sorted(self._names, key=lambda pattern: pattern.count(WILDCARD)):
            pairs = zip(pattern, parts, strict=False)
            if len(pattern) == len(parts) and all(expected in (WILDCARD, part) for expected, part in pairs):
                return _filled(self._names[pattern], pattern, parts)
        return Target((name,))

    def _checked_prefix(self, name: str, value: Any) -> str | None:
        if WILDCARD in name or not (value is None or value == "" or (isinstance(value, str) and value.endswith("."))):
            raise ConfigError(
                f"{self._where}: {name!r} is a prefix of names: it needs another prefix (such as 'model.'), '' or "
                f"null, and no {WILDCARD}; got {value!r}"
            )
        return None if value is None else str(value)

    def _checked_target(self, name: str, value: Any) -> Target | None:
        if value is None:
            return None
        options = value if isinstance(value, Mapping) else {"to": value}
        names = options.get("to")
        names = (names,) if isinstance(names, str) else names
        known = set(options) <= {"to", "rope"} and options.get("rope") in (None, "interleaved")
        if not known or not isinstance(names, list | tuple) or not names or not all(isinstance(n, str) for n in names):
            raise ConfigError(
                f"{self._where}: {name!r} needs a name, a list of names, null, or {{'to': …, 'rope': 'interleaved'}}; "
                f"got {value!r}"
            )
        wildcards = name.split(".").count(WILDCARD)
        for target in names:
            if target.split(".").count(WILDCARD) != wildcards or target.count(WILDCARD) != wildcards:
                counts = f"{wildcards} parts that are {WILDCARD}, and {target!r} must have the same number"
                raise ConfigError(f"{self._where}: {name!r} has {counts}")
        interleaved = options.get("rope") is not None
        if interleaved and not any(map(is_rotated, names)):
            raise ConfigError(f"{self._where}: {name!r} has a 'rope', but {names[0]!r} is not rotated like queries")
        return Target(tuple(names), interleaved)


def is_rotated(name: str) -> bool:
    """Whether a weight, by its Hugging Face name, computes or normalizes queries or keys."""
    return any(part in ("q_proj", "k_proj", "q_norm", "k_norm") for part in name.split("."))


def _filled(target: Target | None, pattern: tuple[str, ...], parts: tuple[str, ...]) -> Target | None:
    if target is None:
        return None
    matched = [part for expected, part in zip(pattern, parts, strict=True) if expected == WILDCARD]
    names = []
    for name in target.names:
        replacements = iter(matched)
        names.append(".".join(next(replacements) if part == WILDCARD else part for part in name.split(".")))
    return target._replace(names=tuple(names))


_EMBEDDING = "model.embed_tokens.weight"
# Larger maps are not worth proposing.
_MAX_ENTRIES = 6

Shapes = Mapping[str, tuple[int, ...]]


def proposed_map(
    entries: Mapping[str, Any], stored: Shapes, weights: Shapes, is_training_state: Callable[[str], bool]
) -> str | None:
    """The JSON of a name map that extends `entries` so that every weight is found in its shape and no tensor is left;
    None if there is none. stored: the checkpoint's tensors. weights: the model's, by Hugging Face name."""
    for more in _candidates(stored):
        proposal = {**entries, **more}
        name_map = NameMap(proposal, "the proposal")
        places: dict[str, str] = {}
        left: dict[str, str] = {}  # -> the name after its prefix is replaced, which an entry must use
        for name, shape in stored.items():
            target = name_map(name)
            if target is None:
                continue
            if len(target.names) > 1:
                places |= dict.fromkeys(target.names, name)
            elif weights.get(target.names[0]) == shape:
                places[target.names[0]] = name
            elif not is_training_state(name):
                left[name] = target.names[0]
        if places.keys() >= weights.keys():
            proposal |= _exclusions(left, set(places.values()))
            return json.dumps(proposal) if len(proposal) <= _MAX_ENTRIES + len(entries) else None
    return None


def _candidates(stored: Shapes) -> Iterator[dict[str, Any]]:
    """Entries to try, in order: none; a prefix removed; the prefix "model." added."""
    yield {}
    for name in stored:
        if name.endswith(f".{_EMBEDDING}"):
            yield {name.removesuffix(_EMBEDDING): ""}
    inner = _EMBEDDING.removeprefix("model.")
    for name in stored:
        if name == inner or (name.endswith(f".{inner}") and name != _EMBEDDING):
            prefix = name.removesuffix(inner)
            yield {prefix: "model."}
            yield {prefix: "model.", "model.lm_head.weight": "lm_head.weight"}


def _exclusions(left: Mapping[str, str], used: set[str]) -> dict[str, None]:
    """Entries that exclude these names: by prefix if no tensor in use has it, or else by whole name."""
    entries: dict[str, None] = {}
    for name, whole in left.items():
        prefix = name.split(".", 1)[0] + "."
        by_name = "." not in name or any(other.startswith(prefix) for other in used)
        entries[whole if by_name else prefix] = None
    return entries


# Parts of names that mark training state. No weight of a supported model has one of them in its name.
_TRAINING_STATE = {
    *("dataloader", "grad_scaler", "lr_scheduler", "lr_schedulers", "optim", "optimizer", "optimizers", "rng_state"),
    *("scheduler", "train_state", "trainer"),
}


class HasShape(Protocol):
    """A stored tensor, in memory or not."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


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
        stored: Mapping[str, HasShape],
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
