"""The fields of a family's config, changed one at a time, and the effect of each change.

python tests/models/changed_fields.py [CASE …] loads a checkpoint for each of some 6,000 changes (of the named cases, or
of the first case of each family) and prints the changes that give other logits than transformers without an error.
"""

import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers_reference import (
    CASES,
    CONFIGS,
    LINEAR,
    LLAMA3,
    MODELS,
    TOLERANCE,
    YARN,
    config_of,
    randomized,
    save,
)

import onward
from onward.errors import OnwardError

# The first case of each family.
FIRST = {case.family: name for name, case in reversed(CASES.items())}
PROMPT = list(range(40))  # past every window, and past the original context of every scaling
_DEFAULT = {"rope_type": "default", "rope_theta": 777.0}
_ROPES: list[dict[str, Any]] = [
    *(LINEAR, LLAMA3, YARN),
    *(YARN | change for change in ({"truncate": False}, {"attention_factor": 0.7}, {"mscale": 1, "mscale_all_dim": 2})),
    *(_DEFAULT | {"partial_rotary_factor": part} for part in (0.5, 1.0)),
    _DEFAULT | {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    _DEFAULT | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16},
]
_WORDS = ["gelu", "silu", "relu", "relu2", "softmax", "sigmoid", "greedy", "noaux_tc", "rope", "nope"]
_TYPES = ["full_attention", "sliding_attention", "linear_attention", "conv", "sparse", "dense", "moe", "mlp"]
# What every config has and no decoder's forward asks for, but the size of the vocabulary, which the prompt needs; and
# whether weights are drawn otherwise.
_GENERAL = {*PreTrainedConfig().to_dict(), "vocab_size", "rescale_prenorm_residual"}


def written(name: str) -> dict[str, Any]:
    """config.json of a case with every field that transformers writes."""
    config = config_of(CASES[name])
    fields = json.loads(config.to_json_string(use_diff=False))
    return fields | {"architectures": [MODELS[CASES[name].family].__name__]}


def changes(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each field with each of the values that it is changed to."""
    for name in sorted(fields.keys() - _GENERAL):
        yield from ((name, value) for value in _values(name, fields[name]) if value != fields[name])


def _values(name: str, value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value, None]
        case int():
            return [value + 1, value * 2, value // 2, 0]
        case float():
            return [value * 1.5 + 0.1, 0.0, None]
        case str():
            return [*_WORDS, None]
        case list():
            others = [value[1:] + value[:1], value[::-1], value[:-1], value + value[-1:], None]
            return others + [[kind] * len(value) for kind in _TYPES if value and isinstance(value[0], str)]
        case dict():
            one = [value | {key: new} for key, old in value.items() for new in _values(key, old)]
            return one + (_ROPES if name == "rope_parameters" or "rope_theta" in value else [])
    return [True, 1, 5, 0.5, "gelu", [0], [1, 0, 1]]


def theirs(name: str, fields: dict[str, Any], folder: Path) -> PreTrainedModel | None:
    """The model of a config.json, which is left in the folder; None: transformers refuses it."""
    family, file = CASES[name].family, folder / "config.json"
    file.write_text(json.dumps(fields))
    try:
        return randomized(family, CONFIGS[family].from_json_file(file))
    except Exception:  # of any kind: each config and each block refuses a value in its own way
        return None


def their_logits(model: PreTrainedModel | None) -> Tensor | None:
    """Logits [T, V] after the prompt; None: this model cannot compute them."""
    if model is None:
        return None
    try:
        with torch.no_grad():
            return model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    except Exception:  # as above
        return None


def difference(name: str, fields: dict[str, Any], folder: Path) -> str | None:
    """How Onward's logits differ from those of transformers; None if they are equal or loading is an error."""
    model = theirs(name, fields, folder)
    want = their_logits(model)
    if model is None or want is None or not want.isfinite().all():
        return None
    save(model, folder)
    (folder / "config.json").write_text(json.dumps(fields))
    try:
        got = onward.load(folder, max_seq_len=128).logits(PROMPT)
    except OnwardError:
        return None
    worst = (got - want).abs().max().item()
    # Weights of the changed sizes may give logits that are not of order 1.
    return f"by {worst:.2g}" if worst > TOLERANCE * max(1.0, want.abs().max().item() / 4) else None


def main(names: list[str]) -> None:
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for name in names or FIRST.values():
        fields = written(name)
        for field, value in changes(fields):
            with tempfile.TemporaryDirectory() as folder:
                if differs := difference(name, fields | {field: value}, Path(folder)):
                    print(f"{name}: {field} {value!r}: logits differ {differs}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
