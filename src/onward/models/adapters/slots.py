"""Room for adapters beside the weights of a model: for each module that one of them changes, a stack of slots."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache.kinds import lazy_zeros
from onward.models.adapters.forward import AdaptedEmbedding, AdaptedForward, AdaptedLinear, LoraUpdate, Updates
from onward.models.adapters.merge import adaptable, part_names
from onward.models.linear import Embedding, Linear, is_marked
from onward.models.model import Model
from onward.ops import QuantizedWeight
from onward.ops.linear import weight_shape

# Slots at first, that of rows without an adapter among them. A slot takes memory when it is first written.
_FIRST_SLOTS = 16
# Bytes: tensors begin with a cache line.
_ALIGNED = 64


@dataclass(frozen=True)
class AdapterCapacity:
    """slots: how many. ranks: the highest rank of each module; those that it lacks have no stack. scaled: the modules
    whose updates have scales and shifts."""

    slots: int = _FIRST_SLOTS
    ranks: Mapping[str, int] = field(default_factory=dict)
    scaled: frozenset[str] = frozenset()

    def holding(self, index: int, updates: Mapping[str, LoraUpdate]) -> "AdapterCapacity":
        """This room, or a larger one, that holds these updates in slot `index` too."""
        higher = {name: max(update.rank, self.ranks.get(name, 0)) for name, update in updates.items()}
        return AdapterCapacity(
            slots=self.slots if index < self.slots else 2 * self.slots,
            ranks={**self.ranks, **higher},
            scaled=self.scaled | {name for name, update in updates.items() if update.scale is not None},
        )


class AdapterSlots:
    """A model with room for adapters, over the weights of another. model: its caches say which slot each row has
    (`KVCache.adapters`)."""

    def __init__(self, base: Model, room: AdapterCapacity) -> None:
        architecture = adaptable(base)
        self.room = room
        leaves, structure = pytree.tree_flatten(base.params, is_leaf=is_marked)
        names = part_names(architecture)
        changed = {
            name: leaf for name, leaf in zip(names, leaves, strict=True) if name is not None and name in room.ranks
        }
        self._updates = _empty(changed, room, base)
        parts = [
            leaf if name is None or name not in self._updates else _adapted(leaf, self._updates[name])
            for name, leaf in zip(names, leaves, strict=True)
        ]
        self.model = replace(base, forward=AdaptedForward(architecture), params=pytree.tree_unflatten(parts, structure))

    def put(self, index: int, updates: Mapping[str, LoraUpdate]) -> None:
        """Write an adapter into a slot that no row has."""
        for name, of_all in self._updates.items():
            of_all.ranks[index] = 0
            if name in updates:
                _write(of_all, index, updates[name])

    def take(self, other: "AdapterSlots", indices: Iterable[int]) -> None:
        """Copy these slots of smaller stacks."""
        for index in indices:
            for name, theirs in other._updates.items():
                _copy(theirs, self._updates[name], index)


def _empty(parts: Mapping[str, Any], room: AdapterCapacity, base: Model) -> dict[str, Updates]:
    """Stacks without adapters, in one memory, where a slot is one piece. Updates of quantized matrices have 8 bits."""
    floats, device = base.params.embed_tokens.weight.dtype, base.device
    shapes: list[tuple[int, int, torch.dtype]] = []  # rows, columns and dtype of the two tensors of each module
    for name, part in parts.items():
        (outputs, inputs), rank = weight_shape(part.weight), room.ranks[name]
        dtype = torch.int8 if isinstance(part, Linear) and isinstance(part.weight, QuantizedWeight) else floats
        if isinstance(part, Embedding):  # [V, R]: what an id takes lies in one piece
            shapes += [(outputs, rank, dtype), (rank, inputs, dtype)]
        else:
            shapes += [(rank, inputs, dtype), (rank, outputs, dtype)]
    sizes = [-(-rows * columns * dtype.itemsize // _ALIGNED) * _ALIGNED for rows, columns, dtype in shapes]
    memory = lazy_zeros((room.slots, sum(sizes)), torch.uint8, device, huge_pages=True)
    pieces = [
        piece.view(dtype)[:, : rows * columns].view(room.slots, rows, columns)
        for piece, (rows, columns, dtype) in zip(torch.split(memory, sizes, dim=1), shapes, strict=True)
    ]
    return {
        name: _of_module(part, a, b, name in room.scaled)
        for (name, part), a, b in zip(parts.items(), pieces[::2], pieces[1::2], strict=True)
    }


def _of_module(part: Any, a: Tensor, b: Tensor, scaled: bool) -> Updates:
    slots, rank, outputs = b.shape
    ranks = torch.zeros(slots, dtype=torch.int32, device=b.device)
    factors = torch.zeros(slots, rank, device=b.device) if b.dtype == torch.int8 else None
    scale, shift = (torch.zeros(slots, outputs, device=b.device) if scaled else None for _ in range(2))
    return Updates(a.transpose(1, 2) if isinstance(part, Embedding) else a, b, ranks, factors, scale, shift)


def _adapted(part: Any, updates: Updates) -> Any:
    """A matrix with its updates."""
    if not isinstance(part, Embedding):
        return AdaptedLinear(part, updates)
    slots, rank, _ = updates.b.shape
    units = torch.eye(rank, dtype=updates.b.dtype, device=updates.b.device).repeat(slots, 1, 1)
    return AdaptedEmbedding(part, updates, units)


def _write(of_all: Updates, index: int, update: LoraUpdate) -> None:
    rank, a, b = update.rank, update.a, update.b
    if of_all.factors is not None:
        (a, a_scales), (b, b_scales) = _rounded(a), _rounded(b)
        of_all.factors[index, :rank] = a_scales * b_scales
    of_all.a[index, :rank], of_all.b[index, :rank] = a, b
    if of_all.scale is not None and of_all.shift is not None:
        of_all.scale[index] = 1.0 if update.scale is None else update.scale
        of_all.shift[index] = -0.0 if update.shift is None else update.shift  # which changes no bit
    of_all.ranks[index] = rank


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers [R, K] from -127 to 127, and the scale [R] of each row."""
    most = matrix.abs().amax(dim=1)
    scales = torch.where(most > 0, most / 127, 1.0)
    return (matrix / scales.unsqueeze(1)).round().clamp(-127, 127), scales


def _copy(source: Updates, to: Updates, index: int) -> None:
    """Copy a slot to larger stacks, bit for bit."""
    rank = int(source.ranks[index])
    if to.scale is not None and to.shift is not None:
        to.scale[index] = 1.0 if source.scale is None else source.scale[index]
        to.shift[index] = -0.0 if source.shift is None else source.shift[index]
    if to.factors is not None and source.factors is not None:
        to.factors[index, :rank] = source.factors[index, :rank]
    to.a[index, :rank], to.b[index, :rank] = source.a[index, :rank], source.b[index, :rank]
    to.ranks[index] = rank
