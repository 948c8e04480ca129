"""From a trainer's names of weights to those of Hugging Face checkpoints, by a small JSON object.

    "tok_embeddings.weight": "model.embed_tokens.weight"      a name
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_…"     `{}` stands for one part between dots, the same in both
    "layers.{}.wqkv.weight": ["…q_proj.weight", "…k_proj.weight", "…v_proj.weight"]   rows of several, in this order
    "layers.{}.wq.weight": {"to": "…q_proj.weight", "rope": "interleaved"}   rotated as pairs of neighbours
    "app.model.": ""                                          a beginning (it ends with a dot), replaced
    "ema.": null, "step_count": null                          left out: all that begins so; this one

A name's longest beginning is replaced first, then the name as a whole is looked up. Names without an entry stay.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from onward.errors import ConfigError, RequestError, one_line

FILE = "name_map.json"
WILDCARD = "{}"

# Modules that wrap another one to run it differently, and write themselves into its names.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class Target(NamedTuple):
    """Where a tensor goes.

    names: the tensors that its rows are, in order; one for most. interleaved: whether the rows of queries and keys
    are rotated as pairs of neighbours (Meta's layout) instead of halves (Hugging Face's).
    """

    names: tuple[str, ...]
    interleaved: bool = False


class NameMap:
    """A name map, read and checked; see the module. `where` names it in errors; `entries` is what it was made of.

    Raises:
        ConfigError: an entry that is none of the above, or has other wildcards than its name.
    """

    def __init__(self, entries: Mapping[str, Any], where: str) -> None:
        self.entries = dict(entries)
        self._where = where
        self._beginnings: dict[str, str | None] = {}
        self._names: dict[tuple[str, ...], Target | None] = {}
        for name, value in entries.items():
            if not isinstance(name, str):
                raise ConfigError(f"{where}: a name must be text; got {name!r}")
            if name == "" or name.endswith("."):
                self._beginnings[name] = self._checked_beginning(name, value)
            else:
                self._names[tuple(name.split("."))] = self._checked_target(name, value)

    @classmethod
    def of(cls, given: "str | os.PathLike[str] | Mapping[str, Any] | None", folder: Path) -> "NameMap":
        """What was given, a file or the object itself; or else the folder's name_map.json, if it has one."""
        if given is None:
            file = folder / FILE
            return cls(_read(file), str(file)) if file.is_file() else cls({}, FILE)
        if isinstance(given, Mapping):
            return cls(given, "name_map")
        if not isinstance(given, str | os.PathLike):
            raise RequestError(f"name_map must be a JSON file or a mapping; got {type(given).__name__}")
        return cls(_read(Path(given).expanduser()), str(given))

    def __call__(self, name: str) -> Target | None:
        """Where the tensor of this name goes; None if it is left out."""
        name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        beginning = max((each for each in self._beginnings if name.startswith(each)), key=len, default=None)
        if beginning is not None:
            replacement = self._beginnings[beginning]
            if replacement is None:
                return None
            name = replacement + name[len(beginning) :]
        parts = tuple(name.split("."))
        # A name without wildcards is meant more than one with them.
        for pattern in sorted(self._names, key=lambda pattern: pattern.count(WILDCARD)):
            if _matches(pattern, parts):
                return _filled(self._names[pattern], pattern, parts)
        return Target((name,))

    def _checked_beginning(self, name: str, value: Any) -> str | None:
        if WILDCARD in name or not (value is None or value == "" or (isinstance(value, str) and value.endswith("."))):
            raise ConfigError(
                f"{self._where}: {name!r} is a beginning of names, which wants another beginning (such as 'model.'), "
                f"'' or null, and no {WILDCARD}; got {value!r}"
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
                f"{self._where}: {name!r} wants a name, a list of names, null, or {{'to': …, 'rope': 'interleaved'}}; "
                f"got {value!r}"
            )
        wildcards = name.split(".").count(WILDCARD)
        for target in names:
            if target.split(".").count(WILDCARD) != wildcards or target.count(WILDCARD) != wildcards:
                raise ConfigError(
                    f"{self._where}: {name!r} has {wildcards} parts that are {WILDCARD}, and {target!r} must have as "
                    "many"
                )
        interleaved = options.get("rope") is not None
        if interleaved and not any(map(is_rotated, names)):
            raise ConfigError(
                f"{self._where}: {name!r} has a rope, but {names[0]!r} is not rotated: queries and keys are"
            )
        return Target(tuple(names), interleaved)


def is_rotated(name: str) -> bool:
    """Whether a weight in Hugging Face's names makes, or scales, queries or keys."""
    return any(part in ("q_proj", "k_proj", "q_norm", "k_norm") for part in name.split("."))


def _matches(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    return len(pattern) == len(parts) and all(
        want in (WILDCARD, part) for want, part in zip(pattern, parts, strict=True)
    )


def _filled(target: Target | None, pattern: tuple[str, ...], parts: tuple[str, ...]) -> Target | None:
    """The wildcards of a target's names replaced by what they matched, in order."""
    if target is None:
        return None
    matched = [part for want, part in zip(pattern, parts, strict=True) if want == WILDCARD]
    names = []
    for name in target.names:
        found = iter(matched)
        names.append(".".join(next(found) if part == WILDCARD else part for part in name.split(".")))
    return target._replace(names=tuple(names))


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"the name map {file} cannot be read as JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"the name map {file} must be a JSON object; got {type(content).__name__}")
    return content
