"""A forward with adapters beside its weights, y * scale + shift + (x Aᵀ) B: each row of a batch with its own, or with
none."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward import ops
from onward.cache import KVCache, PagedKVCache
from onward.errors import RequestError
from onward.models.adapters.adapter import Adapter
from onward.models.adapters.merge import adaptable, check_modules, fitting, fitting_bias, fitting_update, part_names
from onward.models.architecture import Architecture
from onward.models.linear import Embedding, Linear, is_marked
from onward.models.model import Model
from onward.ops import QuantizedWeight, Weight
from onward.ops.linear import stock_weight, weight_shape


class Updates(NamedTuple):
    """The updates of one module by every adapter, of S slots and R ranks, as `ops.lora` takes them.

    a: [S, R, K]; of a table [S, R, V]. b: [S, R, N]. ranks: int32 [S]. factors: float32 [S, R] where a and b are int8.
    scale, shift: float32 [S, N], or both None.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    factors: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None


class AdaptedLinear(NamedTuple):
    """A linear layer with updates. slots: int32 [B], the slot of each row; None until a forward begins."""

    linear: Linear
    updates: Updates
    slots: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """float [R, ..., in] -> [R, ..., out], of the first R rows."""
        assert self.slots is not None, "a forward binds its rows first"
        a, b, ranks, factors, scale, shift = self.updates
        slots = self.slots[: x.shape[0]]
        return ops.lora(x, self.linear(x), a, b, slots, ranks, factors=factors, scale=scale, shift=shift)


class AdaptedEmbedding(NamedTuple):
    """A table with updates. units: [S, R, R], the unit matrix of each slot. slots: as of `AdaptedLinear`."""

    embedding: Embedding
    updates: Updates
    units: Tensor
    slots: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """int [B, T] -> float [B, T, D]."""
        assert self.slots is not None, "a forward binds its rows first"
        table, b, ranks, *_ = self.updates
        of_ids = table.transpose(1, 2)[self.slots.unsqueeze(1), ids]  # [B, T, R]
        return ops.lora(of_ids, self.embedding(ids), self.units, b, self.slots, ranks)


@dataclass(frozen=True, eq=False)
class AdaptedForward:
    """The forward of an architecture over params with updates, and caches that say which adapter each row has."""

    architecture: Architecture

    def __call__(
        self,
        tokens: Tensor,
        offsets: Tensor,
        cache: KVCache | PagedKVCache,
        params: Any,
        *,
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        (slots,) = cache.adapters

        def bound(part: Any) -> Any:
            return part._replace(slots=slots) if _is_adapted(part) else part

        of_rows = pytree.tree_map(bound, params, is_leaf=_is_adapted)
        return self.architecture(tokens, offsets, cache, of_rows, logits_at=logits_at)


def _is_adapted(part: Any) -> bool:
    return isinstance(part, AdaptedLinear | AdaptedEmbedding)


@dataclass(frozen=True)
class LoraUpdate:
    """An adapter's change of one module; all float32.

    a: [R, K]; of a table [R, V], of which ids take columns. b: [R, N]. scale, shift: [N], or both None.
    """

    a: Tensor
    b: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def row_updates(model: Model, adapter: Adapter) -> dict[str, LoraUpdate]:
    """The changes of an adapter by module."""
    names = part_names(adaptable(model))
    parts = pytree.tree_leaves(model.params, is_leaf=is_marked)
    check_modules(adapter, names, parts)
    updates: dict[str, LoraUpdate] = {}
    for name, part in zip(names, parts, strict=True):
        update = None if name is None else _update(name, part, adapter)
        if name is not None and update is not None:
            updates[name] = update
    return updates


def _update(name: str, part: Any, adapter: Adapter) -> LoraUpdate | None:
    if isinstance(part, Linear):
        return _of_linear(name, part, adapter)
    if isinstance(part, Embedding):
        return _of_table(name, part, adapter)
    if name in adapter.updates or {name, f"{name}.weight", f"{name}.bias"} & set(adapter.replaced):
        raise RequestError(
            f"the adapter changes {name}, which cannot differ between the rows of a batch: merge it into the weights "
            "(lm.merge, or onward.load(…, merge=…))"
        )
    return None


def _of_linear(module: str, part: Linear, adapter: Adapter) -> LoraUpdate | None:
    update, own = adapter.updates.get(module), adapter.replaced.get(f"{module}.weight")
    new_bias = adapter.replaced.get(f"{module}.bias")
    if update is None and own is None and new_bias is None:
        return None
    outputs, inputs = weight_shape(part.weight)
    parts = [(torch.zeros(1, inputs), torch.zeros(1, outputs))]  # of a bias alone
    total = torch.zeros(())
    if own is not None or (update is not None and update.magnitude is not None):
        total = _floats(part.weight)
    if own is not None:
        own = fitting(f"{module}.weight", own, part.weight).to(torch.float32)
        parts, total = [_factors(own - total)], own
    if update is not None:
        fitting_update(module, update, (outputs, inputs))
        parts = [*(parts if own is not None else []), (update.a, update.b.T)]
    scale = shift = None
    if update is not None and update.magnitude is not None:
        scale = update.magnitude / (total + update.product).norm(dim=1)
        parts = [(a, b * scale) for a, b in parts]
    if scale is not None or new_bias is not None:
        scale = torch.ones(outputs) if scale is None else scale
        shift = _shift(module, part.bias, new_bias, scale)
    return LoraUpdate(torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts]), scale, shift)


def _shift(module: str, bias: Tensor | None, new: Tensor | None, scale: Tensor) -> Tensor:
    """What makes the new bias, or the old one, of a sum that has the old one times `scale`."""
    wanted = bias if new is None else fitting_bias(module, new, bias)
    if bias is None or wanted is None:
        return torch.full_like(scale, -0.0)  # which no bit of a sum depends on
    return wanted.to(torch.float32) - scale * bias.to(torch.float32)


def _of_table(module: str, part: Embedding, adapter: Adapter) -> LoraUpdate | None:
    own, update = adapter.replaced.get(f"{module}.weight"), adapter.embeddings.get(module)
    if own is None and update is None:
        return None
    rows, width = weight_shape(part.weight)
    parts = []
    if own is not None:
        own = fitting(f"{module}.weight", own, part.weight).to(torch.float32)
        parts.append(((own - _floats(part.weight)).T, torch.eye(width)))
    if update is not None:
        fitting_update(module, update, (width, rows))
        parts.append((update.a, update.b.T))
    return LoraUpdate(torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts]))


def _factors(change: Tensor) -> tuple[Tensor, Tensor]:
    """a [R, K] and b [R, N] of a change [N, K] of any rank: R is the smaller of both."""
    outputs, inputs = change.shape
    return (torch.eye(inputs), change.T) if inputs <= outputs else (change, torch.eye(outputs))


def _floats(weight: Weight) -> Tensor:
    """float32 [N, K]: what a weight stands for."""
    floats = weight.dequantize() if isinstance(weight, QuantizedWeight) else stock_weight(weight)
    return floats.to(device="cpu", dtype=torch.float32)
