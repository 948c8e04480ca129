"""A forward with adapters beside its weights, y * scale + shift + (x Aᵀ) B, selected for each row of a batch."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward import ops
from onward.cache import AdaptedCache
from onward.errors import RequestError
from onward.models.adapters.merge import (
    Adapter,
    adaptable,
    check_modules,
    fitting,
    fitting_bias,
    fitting_update,
    part_names,
)
from onward.models.adapters.steering import steering
from onward.models.contract import logits_and_cache
from onward.models.linear import Embedding, Linear, float_weight, is_marked
from onward.models.model import Forward, Model
from onward.ops.linear import weight_shape


class Updates(NamedTuple):
    """The updates of one module by all adapters, in S slots of R ranks, for `ops.lora`.

    a: [S, R, K]; of a table [S, R, V]. b: [S, R, N]. ranks: int32 [S]. factors: float32 [S, R] if a and b are int8.
    scale, shift: float32 [S, N], or both None.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    factors: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None


class AdaptedLinear(NamedTuple):
    """A linear layer with updates. slots: int32 [B], the slot of each row; None outside a forward pass."""

    linear: Linear
    updates: Updates
    slots: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """float [R, ..., in] -> [R, ..., out], of the first R rows."""
        assert self.slots is not None, "a forward pass sets the slots first"
        a, b, ranks, factors, scale, shift = self.updates
        slots = self.slots[: x.shape[0]]
        return ops.lora(x, self.linear(x), a, b, slots, ranks, factors=factors, scale=scale, shift=shift)


class AdaptedEmbedding(NamedTuple):
    """A table with updates. units: [S, R, R], an identity matrix per slot. slots: as in `AdaptedLinear`."""

    embedding: Embedding
    updates: Updates
    units: Tensor
    slots: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """int [B, T] -> float [B, T, D]."""
        assert self.slots is not None, "a forward pass sets the slots first"
        table, b, ranks, *_ = self.updates
        x_BTR = table.transpose(1, 2)[self.slots.unsqueeze(1), ids]
        return ops.lora(x_BTR, self.embedding(ids), self.units, b, self.slots, ranks)


@dataclass(frozen=True, eq=False)
class AdaptedForward:
    """A forward over the tables of steering, by tap, and params, in which modules may have updates."""

    forward: Forward
    has_updates: bool

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: AdaptedCache, params: Any, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, AdaptedCache]:
        tables, params = params
        params = with_slots(params, cache.slots) if self.has_updates else params
        with steering(tables, cache.slots, tokens, offsets):
            result = self.forward(tokens, offsets, cache.cache, params, logits_at=logits_at)
        logits, inner = logits_and_cache(result)
        return logits, cache if inner is cache.cache else AdaptedCache(inner, cache.slots)


def with_slots(params: Any, slots: Tensor) -> Any:
    """Params with updates, for rows with the adapters in these slots, int32 [B]."""
    return pytree.tree_map(
        lambda part: part._replace(slots=slots) if _is_adapted(part) else part, params, is_leaf=_is_adapted
    )


def _is_adapted(part: Any) -> bool:
    return isinstance(part, AdaptedLinear | AdaptedEmbedding)


@dataclass(frozen=True)
class LoraUpdate:
    """An adapter's change of one module; all float32. a: [R, K]; of a table [R, V]. b: [R, N]. scale, shift: [N], or
    both None."""

    a: Tensor
    b: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def row_updates(model: Model, adapter: Adapter) -> dict[str, LoraUpdate]:
    """The updates of an adapter by module."""
    names = part_names(adaptable(model))
    parts = pytree.tree_leaves(model.params, is_leaf=is_marked)
    check_modules(adapter, names, parts)
    found = {n: _update(n, part, adapter) for n, part in zip(names, parts, strict=True) if n is not None}
    return {name: update for name, update in found.items() if update is not None}


def _update(name: str, part: Any, adapter: Adapter) -> LoraUpdate | None:
    if isinstance(part, Linear):
        return _linear_update(name, part, adapter)
    if isinstance(part, Embedding):
        return _table_update(name, part, adapter)
    if name in adapter.updates or {name, f"{name}.weight", f"{name}.bias"} & set(adapter.replaced):
        raise RequestError(
            f"the adapter changes {name}, which cannot differ between the rows of a batch: merge it into the weights "
            "(lm.merge, or onward.load(…, merge=…))"
        )
    return None


def _linear_update(module: str, part: Linear, adapter: Adapter) -> LoraUpdate | None:
    update, own = adapter.updates.get(module), adapter.replaced.get(f"{module}.weight")
    new_bias = adapter.replaced.get(f"{module}.bias")
    if update is None and own is None and new_bias is None:
        return None
    outputs, inputs = weight_shape(part.weight)
    parts = [(torch.zeros(1, inputs), torch.zeros(1, outputs))]  # for a bias alone
    total = torch.zeros(())
    if own is not None or (update is not None and update.magnitude is not None):
        total = float_weight(part.weight).to(device="cpu", dtype=torch.float32)
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
    """The shift to the new (or old) bias of a sum that includes the old one times `scale`."""
    target = bias if new is None else fitting_bias(module, new, bias)
    if bias is None or target is None:
        return torch.full_like(scale, -0.0)  # adding it changes no bit
    return target.to(torch.float32) - scale * bias.to(torch.float32)


def _table_update(module: str, part: Embedding, adapter: Adapter) -> LoraUpdate | None:
    own, update = adapter.replaced.get(f"{module}.weight"), adapter.embeddings.get(module)
    if own is None and update is None:
        return None
    rows, width = weight_shape(part.weight)
    parts = []
    if own is not None:
        own = fitting(f"{module}.weight", own, part.weight).to(torch.float32)
        parts.append(((own - float_weight(part.weight).to(device="cpu", dtype=torch.float32)).T, torch.eye(width)))
    if update is not None:
        fitting_update(module, update, (width, rows))
        parts.append((update.a, update.b.T))
    return LoraUpdate(torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts]))


def _factors(change: Tensor) -> tuple[Tensor, Tensor]:
    """a [R, K] and b [R, N] of a change [N, K] of any rank: R is the smaller dimension."""
    outputs, inputs = change.shape
    return (torch.eye(inputs), change.T) if inputs <= outputs else (change, torch.eye(outputs))
