"""The name map that a training checkpoint seems to want, for the error that says it has none."""

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
    """JSON of a name map under which every weight is there, in its shape, and nothing is left over; None for none.

    Args:
        entries: the name map in use, which the proposal extends.
        stored: the checkpoint's tensors.
        weights: those of the model, by Hugging Face's names.
        is_training_state: whether a stored tensor is left where it is without being named.
    """
    for more in _candidates(stored):
        proposal = {**entries, **more}
        name_map = NameMap(proposal, "the proposal")
        places: dict[str, str] = {}
        left: dict[str, str] = {}  # by the name under which an entry finds it: its beginning is replaced before
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
    """Nothing but what is left out; a beginning too many; the beginning of a causal model's inner one too few."""
    yield {}
    for name in stored:
        if name.endswith(f".{_EMBEDDING}"):
            yield {name.removesuffix(_EMBEDDING): ""}
    inner = _EMBEDDING.removeprefix("model.")
    for name in stored:
        if name == inner or (name.endswith(f".{inner}") and name != _EMBEDDING):
            beginning = name.removesuffix(inner)
            yield {beginning: "model."}
            yield {beginning: "model.", "model.lm_head.weight": "lm_head.weight"}


def _left_out(left: Mapping[str, str], used: set[str]) -> dict[str, None]:
    """Entries that leave these out: by a beginning where no weight in use has it too, else by the whole name."""
    entries: dict[str, None] = {}
    for name, whole in left.items():
        beginning = name.split(".", 1)[0] + "."
        alone = "." not in name or any(other.startswith(beginning) for other in used)
        entries[whole if alone else beginning] = None
    return entries
