"""Merge an adapter into the weights: W becomes W + B A, after which the model is like any other."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.adapters.added_tokens import grown, with_added_tokens
from onward.adapters.peft_folder import Adapter, Update
from onward.adapters.places import adaptable, check_modules, fitting, fitting_bias, fitting_update, part_names
from onward.errors import RequestError
from onward.models import Architecture, Embedding, LatentLinear, Linear, Model, Router, ShortConv
from onward.models.linear import is_marked
from onward.ops import NativeWeight, QuantizedWeight, Weight, pack
from onward.ops.linear import stock_weight
from onward.ops.quantized import ROUNDED_FORMATS


def merged_model(model: Model, adapter: Adapter) -> Model:
    """A model of a built-in family with an adapter merged in (`merged_params`).

    Raises:
        RequestError: the model's forward is of no architecture.
    """
    architecture = adaptable(model)
    if grown(architecture, adapter) is not architecture:
        raise RequestError("an adapter with tokens of its own is merged as the model is loaded: onward.load(…, merge=)")
    return replace(model, params=merged_params(architecture, model.params, adapter))


def merged_params(architecture: Architecture, params: Any, adapter: Adapter) -> Any:
    """The params with an adapter merged in, in the dtype and layout that they have. The given ones are not changed.

    Sums are computed in float32 and rounded once. Where the head is tied to an embedding that the adapter changes, the
    head keeps the old weight, as in the model with the adapter beside it. With tokens of the adapter's own, the params
    are those of `grown`, and a tied head stays tied.

    Raises:
        CheckpointError: the adapter is for another model: a module is not there, or of another kind or shape.
        RequestError: the weights are quantized.
    """
    params, adapter = with_added_tokens(architecture, params, adapter)
    names = part_names(architecture)
    leaves, structure = pytree.tree_flatten(params, is_leaf=is_marked)
    check_modules(adapter, names, leaves)
    merged = [_merged(leaf, name, adapter) for leaf, name in zip(leaves, names, strict=True)]
    return pytree.tree_unflatten(merged, structure)


def _merged(leaf: Any, name: str | None, adapter: Adapter) -> Any:
    if isinstance(leaf, Linear | Router):
        return _merged_linear(leaf, str(name), adapter)
    if isinstance(leaf, LatentLinear):
        merged = _merged_linear(Linear(leaf.stock), str(name), adapter).weight
        assert isinstance(merged, Tensor), "stock stays stock"
        new = replace(leaf, weight=merged)
        return new if isinstance(leaf.weight, Tensor) else new.packed()
    if isinstance(leaf, Embedding):
        return _merged_embedding(leaf, str(name), adapter)
    if isinstance(leaf, ShortConv):
        return _merged_conv(leaf, str(name), adapter)
    replaced = None if name is None else adapter.replaced.get(name)
    return leaf if replaced is None else _like(leaf, fitting(str(name), replaced, leaf))


def _merged_linear(part: Linear | Router, module: str, adapter: Adapter) -> Linear | Router:
    weight, bias = part.weight, part.bias
    if (replaced := adapter.replaced.get(f"{module}.weight")) is not None:
        weight = _like(weight, fitting(f"{module}.weight", replaced, weight))
    if (update := adapter.updates.get(module)) is not None:
        weight = _like(weight, updated(module, _stock(module, weight), update))
    if (new_bias := adapter.replaced.get(f"{module}.bias")) is not None:
        fitting_bias(module, new_bias, bias)
        bias = None if bias is None else _like(bias, new_bias)
    return part._replace(weight=weight, bias=bias)


def _merged_conv(part: ShortConv, module: str, adapter: Adapter) -> ShortConv:
    weight, bias = part.weight, part.bias
    if (replaced := adapter.replaced.get(f"{module}.weight")) is not None:
        stock = part.by_tap.T.unsqueeze(1)
        weight = _like(stock, fitting(f"{module}.weight", replaced, stock))
    if (new_bias := adapter.replaced.get(f"{module}.bias")) is not None:
        fitting_bias(module, new_bias, bias)
        bias = None if bias is None else _like(bias, new_bias)
    return ShortConv(weight, bias)


def updated(module: str, weight: Tensor, update: Update) -> Tensor:
    """float32 [N, K]: W + B A of a stock weight [N, K]; with magnitudes its rows are given those norms."""
    total = weight.to(torch.float32) + fitting_update(module, update, tuple(weight.shape)).product
    return total if update.magnitude is None else total * (update.magnitude / total.norm(dim=1)).unsqueeze(1)


def _merged_embedding(part: Embedding, module: str, adapter: Adapter) -> Embedding:
    weight = part.weight
    if (replaced := adapter.replaced.get(f"{module}.weight")) is not None:
        weight = _like(weight, fitting(f"{module}.weight", replaced, weight))
    if (added := adapter.embeddings.get(module)) is not None:
        stock = _stock(module, weight).to(torch.float32)
        weight = _like(weight, stock + fitting_update(module, added, (stock.shape[1], stock.shape[0])).product.T)
    return Embedding(weight)


def _stock(module: str, weight: Weight) -> Tensor:
    """The float weight [N, K], packed or not.

    Raises:
        RequestError: it is quantized.
    """
    if isinstance(weight, QuantizedWeight):
        if weight.format not in ROUNDED_FORMATS:
            return weight.dequantize()
        raise RequestError(
            f"{module} is {weight.format}, and an adapter is merged into float weights: merge it before quantizing "
            "(onward.load(…, merge=adapter, quantize=…))"
        )
    return stock_weight(weight)


def _like(old: Weight, new: Tensor) -> Any:
    """A float32 weight in the dtype, on the device and in the layout of the old one."""
    if isinstance(old, NativeWeight):
        return pack(new.to(old.data.dtype))
    if isinstance(old, QuantizedWeight):
        if old.format not in ROUNDED_FORMATS:
            return pack(new.to(dtype=old.dtype, device=old.device))
        raise RequestError("an adapter is merged into float weights: merge it before quantizing")
    return new.to(dtype=old.dtype, device=old.device)
