"""Proposes a name map for a training checkpoint, in the error that says that its names do not fit."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from onward.checkpoint.name_map import NameMap

_EMBEDDING = "model.embed_tokens.weight"
# A map of more entries explains nothing.
_MOST_ENTRIES = 6

Shapes = Mapping[str, tuple[int, ...]]


def proposed_map(
    entries: Mapping[str, Any], stored: Shapes, weights: Shapes, is_training_state: Callable[[str], bool]
) -> str | None:
    """JSON of a name map under which every weight is there in its shape and nothing is left over; None if none is.

    Args:
        entries: the name map in use, which the proposal extends.
        stored: the checkpoint's tensors.
        weights: those of the model, by Hugging Face's names.
        is_training_state: whether a stored tensor is left out without an entry.
    """
    for more in _candidates(stored):
        proposal = {**entries, **more}
        name_map = NameMap(proposal, "the proposal")
        places: dict[str, str] = {}
        left: dict[str, str] = {}  # -> the name that an entry has to have: after its prefix is replaced
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
            proposal |= _left_out(left, set(places.values()))
            return json.dumps(proposal) if len(proposal) <= _MOST_ENTRIES + len(entries) else None
    return None


def _candidates(stored: Shapes) -> Iterator[dict[str, Any]]:
    """Entries to try, in order: none; a prefix removed; the prefix "model." added, where the names lack it."""
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


def _left_out(left: Mapping[str, str], used: set[str]) -> dict[str, None]:
    """Entries that leave these names out: by prefix where no tensor in use has that prefix, else by whole name."""
    entries: dict[str, None] = {}
    for name, whole in left.items():
        prefix = name.split(".", 1)[0] + "."
        alone = "." not in name or any(other.startswith(prefix) for other in used)
        entries[whole if alone else prefix] = None
    return entries
