"""Merge an adapter into the weights: W becomes W + B A, after which the model is like any other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.adapters.peft_folder import Adapter, Update, changed_modules
from onward.adapters.places import part_names
from onward.errors import CheckpointError, RequestError
from onward.models import Architecture, Embedding, Linear, Model, Router, ShortConv, architecture_of
from onward.models.linear import is_marked
from onward.ops import NativeWeight, QuantizedWeight, Weight, pack
from onward.ops.linear import OneDnnWeight, stock_weight, weight_shape


def merged_model(model: Model, adapter: Adapter) -> Model:
    """A model of a built-in family with an adapter merged in (`merged_params`).

    Raises:
        RequestError: the model's forward is of no architecture.
    """
    architecture = architecture_of(model)
    if architecture is None:
        raise RequestError("an adapter names modules of a checkpoint, and this model's forward was made from none")
    return replace(model, params=merged_params(architecture, model.params, adapter))


def merged_params(architecture: Architecture, params: Any, adapter: Adapter) -> Any:
    """The params with an adapter merged in, in the dtype and layout that they have. The given ones are not changed.

    Sums are computed in float32 and rounded once. Where the head is tied to an embedding that the adapter changes, the
    head keeps the old weight, as in the model with the adapter beside it.

    Raises:
        CheckpointError: the adapter is for another model: a module is not there, or of another shape.
        RequestError: the weights are quantized.
    """
    names = part_names(architecture)
    check_modules(adapter, [name for name in names if name is not None])
    leaves, structure = pytree.tree_flatten(params, is_leaf=is_marked)
    merged = [_merged(leaf, name, adapter) for leaf, name in zip(leaves, names, strict=True)]
    return pytree.tree_unflatten(merged, structure)


def _merged(leaf: Any, name: str | None, adapter: Adapter) -> Any:
    if isinstance(leaf, Linear | Router):
        return _merged_linear(leaf, str(name), adapter)
    if isinstance(leaf, Embedding):
        return _merged_embedding(leaf, str(name), adapter)
    if isinstance(leaf, ShortConv):
        stock = leaf.by_tap.T.unsqueeze(1)
        replaced = adapter.replaced.get(f"{name}.weight")
        return leaf if replaced is None else leaf._replace(weight=_like(stock, _fitting(str(name), replaced, stock)))
    replaced = None if name is None else adapter.replaced.get(name)
    return leaf if replaced is None else _like(leaf, _fitting(str(name), replaced, leaf))


def _merged_linear(part: Linear | Router, module: str, adapter: Adapter) -> Linear | Router:
    weight, bias = part.weight, part.bias
    if (replaced := adapter.replaced.get(f"{module}.weight")) is not None:
        weight = _like(weight, _fitting(f"{module}.weight", replaced, weight))
    if (update := adapter.updates.get(module)) is not None:
        weight = _like(weight, updated(module, _stock(module, weight), update))
    if (new_bias := adapter.replaced.get(f"{module}.bias")) is not None:
        if bias is None:
            raise CheckpointError(f"the adapter has a bias for {module}, and the model has none there")
        bias = _fitting(f"{module}.bias", new_bias, bias).to(bias.dtype)
    return part._replace(weight=weight, bias=bias)


def check_modules(adapter: Adapter, modules: Sequence[str]) -> None:
    """Raise `CheckpointError` where an adapter changes a module that is none of the model's."""
    known = {*modules, *(name.rpartition(".")[0] for name in modules)}  # of a norm the tensor is known by its name
    if unknown := sorted(set(changed_modules(adapter)) - known):
        raise CheckpointError(
            f"the adapter changes {len(unknown)} modules that the model does not have, {unknown[0]!r} for one: is it "
            "for another model?"
        )


def updated(module: str, weight: Tensor, update: Update) -> Tensor:
    """float32 [N, K]: W + B A of a stock weight [N, K]; with magnitudes its rows are given those norms."""
    if weight.shape != (update.b.shape[0], update.a.shape[1]):
        raise CheckpointError(
            f"the adapter's update of {module} is {[update.b.shape[0], update.a.shape[1]]}, and the model's weight "
            f"{list(weight.shape)}: it is for another model"
        )
    total: Tensor = weight.to(torch.float32) + update.b @ update.a
    return total if update.magnitude is None else total * (update.magnitude / total.norm(dim=1)).unsqueeze(1)


def _merged_embedding(part: Embedding, module: str, adapter: Adapter) -> Embedding:
    weight = part.weight
    if (replaced := adapter.replaced.get(f"{module}.weight")) is not None:
        weight = _like(weight, _fitting(f"{module}.weight", replaced, weight))
    if (added := adapter.embeddings.get(module)) is not None:
        stock = _stock(module, weight)
        weight = _like(weight, stock.to(torch.float32) + _fitting(f"the update of {module}", added, stock))
    return Embedding(weight)


def _fitting(name: str, tensor: Tensor, weight: Weight) -> Tensor:
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else weight_shape(weight)
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"the adapter's {name} is {list(tensor.shape)}, and the model's {list(shape)}")
    return tensor


def _stock(module: str, weight: Weight) -> Tensor:
    """The float weight [N, K], packed or not.

    Raises:
        RequestError: it is quantized.
    """
    if isinstance(weight, QuantizedWeight):
        raise RequestError(
            f"{module} is {weight.format}, and an adapter is merged into float weights: merge it before quantizing "
            "(onward.load(…, merge=adapter, quantize=…))"
        )
    return stock_weight(weight)


def _like(old: Weight, new: Tensor) -> Any:
    """A float32 weight in the dtype, on the device and in the layout of the old one."""
    if isinstance(old, NativeWeight):
        return pack(new.to(old.data.dtype))
    if isinstance(old, OneDnnWeight):
        return pack(new.to(old.blocks.dtype))
    if isinstance(old, QuantizedWeight):
        raise RequestError("an adapter is merged into float weights: merge it before quantizing")
    return new.to(dtype=old.dtype, device=old.device)
