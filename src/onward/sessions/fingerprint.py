"""What tells one model from another in a saved session: its config, and a digest of every weight.

A digest does not depend on the weight's layout: a model packed for another machine's kernels is the same model.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from onward import ops
from onward.models import Model, architecture_of
from onward.ops import QuantizedWeight
from onward.ops.packed import NativeWeight
from onward.sessions.weights_digest import digests_of, weights_of


def fingerprint(model: Model) -> dict[str, Any]:
    """JSON values that differ between two models.

    vocab_size. config: a built-in family's; {} for a user's own forward, which cannot be looked into. weights: by
    place in the params, "dtype shape digest" for each. The digest is "?" for a layout that hides its bytes. All bytes
    of the weights are read, once for each state of them.
    """
    digests = digests_of(model)
    return {
        "vocab_size": model.vocab_size,
        "config": _config(model),
        "weights": {name: f"{_kind(weight)} {digests[name]}" for name, weight in weights_of(model).items()},
    }


def difference(saved: Mapping[str, Any], model: Model) -> str | None:
    """The first difference between the model of a saved fingerprint and `model`, in words; None if there is none."""
    now = fingerprint(model)
    if saved["vocab_size"] != now["vocab_size"]:
        return f"its vocabulary has {saved['vocab_size']} ids, this model's {now['vocab_size']}"
    if (differs := _first_difference("", saved["config"], now["config"])) is not None:
        return "its {} is {}, this model's {}".format(*differs)
    for name in {**saved["weights"], **now["weights"]}:
        was, here = saved["weights"].get(name), now["weights"].get(name)
        if was is None or here is None:
            return f"{'this model' if was is None else 'it'} alone has a weight {name}"
        (*kind, digest), (*kind_here, digest_here) = was.split(), here.split()
        if kind != kind_here:
            return f"its {name} is {' '.join(kind)}, this model's {' '.join(kind_here)}"
        if digest != digest_here and "?" not in (digest, digest_here):
            return f"its {name} has other numbers than this model's"
    return None


def _first_difference(name: str, was: Any, here: Any) -> tuple[str, Any, Any] | None:
    """The first place where two JSON values differ: its name, and what each has there."""
    if isinstance(was, dict) and isinstance(here, dict):
        pairs = [(f"{name}.{key}".lstrip("."), was.get(key), here.get(key)) for key in {**was, **here}]
    elif isinstance(was, list) and isinstance(here, list):
        if len(was) != len(here):
            return f"number of {name}", len(was), len(here)
        pairs = [(f"{name}[{index}]", *both) for index, both in enumerate(zip(was, here, strict=True))]
    else:
        return None if was == here else (name, was, here)
    return next((found for pair in pairs if (found := _first_difference(*pair)) is not None), None)


def computed_by(model: Model) -> str:
    """What runs a model here, such as "cpu native avx512": other kernels may round differently."""
    return " ".join((model.device.type, *(ops.choice() if model.device.type == "cpu" else ())))


def _config(model: Model) -> dict[str, Any]:
    architecture = architecture_of(model)
    described: dict[str, Any] = asdict(architecture) if is_dataclass(architecture) else {}
    config: dict[str, Any] = json.loads(json.dumps(described))  # a tuple is a list in JSON
    return config


def _kind(weight: Any) -> str:
    """The dtype, or the format of weights in few bits, and the shape."""
    kind: object
    shape: tuple[int, ...]
    if isinstance(weight, NativeWeight):
        kind, shape = weight.data.dtype, (weight.rows, weight.inputs)
    else:
        kind, shape = weight.format if isinstance(weight, QuantizedWeight) else weight.dtype, weight.shape
    return f"{str(kind).removeprefix('torch.')} {'x'.join(map(str, shape))}"
