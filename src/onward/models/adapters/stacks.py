"""Stacks of adapters beside a model's weights: slots for each module that an adapter changes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache.plan import lazy_zeros
from onward.models.adapters.forward import AdaptedEmbedding, AdaptedForward, AdaptedLinear, LoraUpdate, Updates
from onward.models.adapters.merge import adaptable, part_names
from onward.models.adapters.steering import Steer, SteerTable
from onward.models.linear import Embedding, Linear, is_marked
from onward.models.model import Model
from onward.ops import QuantizedWeight
from onward.ops.linear import weight_shape

# The initial number of slots, including that of rows without an adapter. A slot takes memory when first written.
_INITIAL_SLOTS = 16
_ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True)
class AdapterCapacity:
    """ranks: the maximum rank of each module; other modules have no stack. scaled: the modules whose updates have
    scales and shifts. vectors: the maximum number of vectors at each tap that is steered."""

    slots: int = _INITIAL_SLOTS
    ranks: Mapping[str, int] = field(default_factory=dict)
    scaled: frozenset[str] = frozenset()
    vectors: Mapping[str, int] = field(default_factory=dict)

    def including(
        self, index: int, updates: Mapping[str, LoraUpdate], steers: Mapping[str, Steer] = MappingProxyType({})
    ) -> "AdapterCapacity":
        """This capacity, enlarged where needed to hold these updates and steers in slot `index`."""
        higher = {name: max(update.rank, self.ranks.get(name, 0)) for name, update in updates.items()}
        # Powers of two, since a table of another size is another program.
        counts = {name: 1 << (steer.count - 1).bit_length() for name, steer in steers.items()}
        longer = {name: max(count, self.vectors.get(name, 0)) for name, count in counts.items()}
        return AdapterCapacity(
            slots=self.slots if index < self.slots else 2 * self.slots,
            ranks={**self.ranks, **higher},
            scaled=self.scaled | {name for name, update in updates.items() if update.scale is not None},
            vectors={**self.vectors, **longer},
        )


class AdapterSlots:
    """A model with slots for adapters, and the weights of another. model: its caches have the slot of each row
    (`KVCache.adapters`). params: the base's with updates, without slots."""

    def __init__(self, base: Model, capacity: AdapterCapacity) -> None:
        self.capacity = capacity
        self._updates: dict[str, Updates] = {}
        self.params = base.params
        if capacity.ranks:
            leaves, structure = pytree.tree_flatten(base.params, is_leaf=is_marked)
            modules = list(zip(part_names(adaptable(base)), leaves, strict=True))
            changed = {name: leaf for name, leaf in modules if name is not None and name in capacity.ranks}
            self._updates = empty_stacks(changed, capacity, base)
            parts = [
                leaf if name is None or name not in self._updates else _adapted(leaf, self._updates[name])
                for name, leaf in modules
            ]
            self.params = pytree.tree_unflatten(parts, structure)
        self._tables = {
            name: SteerTable.empty(capacity.slots, count, base, name)
            for name, count in sorted(capacity.vectors.items())
        }
        forward = AdaptedForward(base.forward, bool(self._updates))
        self.model = replace(base, forward=forward, params=(self._tables, self.params))

    def put(self, index: int, updates: Mapping[str, LoraUpdate], steers: Mapping[str, Steer], base: int) -> None:
        """Write an adapter and steers into an unused slot. base: the slot of the adapter if it is not in `updates`."""
        for name, table in self._tables.items():
            table.put(index, steers.get(name))
        for name, stack in self._updates.items():
            stack.ranks[index] = 0
            if name in updates:
                write_update(stack, index, updates[name])
            elif base:
                _copy(stack, stack, base, index)

    def copy(self, other: "AdapterSlots", indices: Collection[int]) -> None:
        """Copy these slots from smaller stacks."""
        for name, table in other._tables.items():
            self._tables[name].copy(table, indices)
        for index in indices:
            for name, source in other._updates.items():
                _copy(source, self._updates[name], index, index)


def empty_stacks(parts: Mapping[str, Any], capacity: AdapterCapacity, base: Model) -> dict[str, Updates]:
    """Empty stacks in one memory block, where a slot is contiguous. Updates of quantized matrices are int8."""
    floats, device = base.params.embed_tokens.weight.dtype, base.device
    shapes: list[tuple[int, int, torch.dtype]] = []  # rows, columns and dtype of both tensors of each module
    for name, part in parts.items():
        (outputs, inputs), rank = weight_shape(part.weight), capacity.ranks[name]
        dtype = torch.int8 if isinstance(part, Linear) and isinstance(part.weight, QuantizedWeight) else floats
        if isinstance(part, Embedding):  # [V, R]: the row of an id is contiguous
            shapes += [(outputs, rank, dtype), (rank, inputs, dtype)]
        else:
            shapes += [(rank, inputs, dtype), (rank, outputs, dtype)]
    sizes = [-(-rows * columns * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for rows, columns, dtype in shapes]
    memory = lazy_zeros((capacity.slots, sum(sizes)), torch.uint8, device, huge_pages=True)
    pieces = [
        piece.view(dtype)[:, : rows * columns].view(capacity.slots, rows, columns)
        for piece, (rows, columns, dtype) in zip(torch.split(memory, sizes, dim=1), shapes, strict=True)
    ]
    return {
        name: _stack(part, a, b, name in capacity.scaled)
        for (name, part), a, b in zip(parts.items(), pieces[::2], pieces[1::2], strict=True)
    }


def _stack(part: Any, a: Tensor, b: Tensor, scaled: bool) -> Updates:
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


def write_update(stack: Updates, index: int, update: LoraUpdate) -> None:
    rank, a, b = update.rank, update.a, update.b
    if stack.factors is not None:
        (a, a_scales), (b, b_scales) = rounded_rows(a), rounded_rows(b)
        stack.factors[index, :rank] = a_scales * b_scales
    stack.a[index, :rank], stack.b[index, :rank] = a, b
    if stack.scale is not None and stack.shift is not None:
        stack.scale[index] = 1.0 if update.scale is None else update.scale
        stack.shift[index] = -0.0 if update.shift is None else update.shift  # adding it changes no bit
    stack.ranks[index] = rank


def rounded_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Integers [R, K] from -127 to 127, and the scale [R] of each row."""
    largest = matrix.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    return (matrix / scales.unsqueeze(1)).round().clamp(-127, 127), scales


def _copy(source: Updates, to: Updates, slot: int, index: int) -> None:
    """Copy a slot of `source` to a slot of stacks of the same size or larger, bit for bit."""
    rank = int(source.ranks[slot])
    if to.scale is not None and to.shift is not None:
        to.scale[index] = 1.0 if source.scale is None else source.scale[slot]
        to.shift[index] = -0.0 if source.shift is None else source.shift[slot]
    if to.factors is not None and source.factors is not None:
        to.factors[index, :rank] = source.factors[slot, :rank]
    to.a[index, :rank], to.b[index, :rank] = source.a[slot, :rank], source.b[slot, :rank]
    to.ranks[index] = rank
