"""What tells one model from another in a saved session: its numbers, and a sample of every weight.

The sample is of the weight and not of its layout: a model packed for another machine's kernels is the same model.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward import ops
from onward.models import DecoderConfig, Model
from onward.ops import QuantizedWeight
from onward.ops.linear import OneDnnWeight
from onward.ops.packed import NativeWeight

_WEIGHTS = (QuantizedWeight, NativeWeight, OneDnnWeight)
# Elements read of a weight. Fine-tuning changes most of a weight, a merged adapter all of it.
_SAMPLE = 1024


def fingerprint(model: Model) -> dict[str, Any]:
    """JSON of a model that another one does not share.

    vocab_size; config: of the built-in decoder, {} for a forward of one's own, which cannot be looked into;
    weights: for each by its place in the params "dtype shape sample", sample being a hash, or "?" in a layout that
    hides single elements.
    """
    return {
        "vocab_size": model.vocab_size,
        "config": _config(model),
        "weights": {
            pytree.keystr(path).lstrip("."): _described(leaf)
            for path, leaf in pytree.tree_flatten_with_path(
                model.params, is_leaf=lambda node: isinstance(node, _WEIGHTS)
            )[0]
            if isinstance(leaf, (Tensor, *_WEIGHTS))
        },
    }


def difference(saved: Mapping[str, Any], model: Model) -> str | None:
    """The first thing in which the model of a saved fingerprint is another than `model`, in words; None for none."""
    now = fingerprint(model)
    if saved["vocab_size"] != now["vocab_size"]:
        return f"its vocabulary has {saved['vocab_size']} ids, this model's {now['vocab_size']}"
    for name in {**saved["config"], **now["config"]}:
        was, here = saved["config"].get(name), now["config"].get(name)
        if was != here:
            return f"its {name} is {was}, this model's {here}"
    for name in {**saved["weights"], **now["weights"]}:
        was, here = saved["weights"].get(name), now["weights"].get(name)
        if was is None or here is None:
            return f"{'this model' if was is None else 'it'} alone has a weight {name}"
        (*kind, sample), (*kind_here, sample_here) = was.split(), here.split()
        if kind != kind_here:
            return f"its {name} is {' '.join(kind)}, this model's {' '.join(kind_here)}"
        if sample != sample_here and "?" not in (sample, sample_here):
            return f"its {name} has other numbers than this model's"
    return None


def computed_by(model: Model) -> str:
    """What runs a model here, such as "cpu native avx512": other kernels may round otherwise."""
    return " ".join((model.device.type, *(ops.choice() if model.device.type == "cpu" else ())))


def _config(model: Model) -> dict[str, Any]:
    bound = model.forward.args if isinstance(model.forward, functools.partial) else ()
    configs = (asdict(argument) for argument in bound if isinstance(argument, DecoderConfig))
    config: dict[str, Any] = json.loads(json.dumps(next(configs, {})))  # a tuple is a list in JSON
    return config


def _described(weight: Tensor | QuantizedWeight | NativeWeight | OneDnnWeight) -> str:
    if isinstance(weight, NativeWeight):
        at = _places(weight.rows * weight.inputs)
        row, column = at // weight.inputs, at % weight.inputs
        block, neighbours = weight.data.shape[2:]
        values = weight.data[row // block, column // neighbours, row % block, column % neighbours]
        return _joined(weight.data.dtype, (weight.rows, weight.inputs), values)
    if isinstance(weight, OneDnnWeight):
        return _joined(weight.blocks.dtype, weight.blocks.shape, None)
    if isinstance(weight, QuantizedWeight):
        return _joined(weight.format, weight.shape, _elements(weight.data))
    plain = weight.layout == torch.strided and type(weight) in (Tensor, torch.nn.Parameter)
    return _joined(weight.dtype, weight.shape, _elements(weight) if plain else None)


def _joined(kind: object, shape: tuple[int, ...], values: Tensor | None) -> str:
    sample = "?" if values is None else hashlib.blake2b(as_bytes(values), digest_size=8).hexdigest()
    return f"{str(kind).removeprefix('torch.')} {'x'.join(map(str, shape))} {sample}"


def _elements(tensor: Tensor) -> Tensor:
    at = _places(tensor.numel()).to(tensor.device)
    return tensor.detach()[torch.unravel_index(at, tensor.shape)] if tensor.dim() else tensor.detach()


def _places(count: int) -> Tensor:
    """All of few elements, or some of many: spread out so that they lie in no one row or column."""
    if count <= _SAMPLE:
        return torch.arange(count)
    return torch.arange(_SAMPLE) * 2_654_435_761 % count


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in order."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
