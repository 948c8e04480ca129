"""The adapters that requests can name, loaded and dropped at runtime, and their memory beside a model's weights: a
stack of slots for each module that an adapter changes."""

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache.plan import lazy_zeros
from onward.errors import RequestError
from onward.models.adapters.forward import (
    AdaptedEmbedding,
    AdaptedForward,
    AdaptedLinear,
    LoraUpdate,
    Updates,
    row_updates,
)
from onward.models.adapters.merge import Adapter, adaptable, part_names
from onward.models.linear import Embedding, Linear, is_marked
from onward.models.model import Model
from onward.models.run import Run
from onward.ops import QuantizedWeight
from onward.ops.linear import weight_shape
from onward.util.process import renew_in_forks
from onward.util.text import described

# The initial number of slots, including that of rows without an adapter. A slot takes memory when first written.
_INITIAL_SLOTS = 16
_ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True)
class AdapterCapacity:
    """ranks: the maximum rank of each module; other modules have no stack. scaled: the modules whose updates have
    scales and shifts."""

    slots: int = _INITIAL_SLOTS
    ranks: Mapping[str, int] = field(default_factory=dict)
    scaled: frozenset[str] = frozenset()

    def including(self, index: int, updates: Mapping[str, LoraUpdate]) -> "AdapterCapacity":
        """This capacity, enlarged where needed to hold these updates in slot `index`."""
        higher = {name: max(update.rank, self.ranks.get(name, 0)) for name, update in updates.items()}
        return AdapterCapacity(
            slots=self.slots if index < self.slots else 2 * self.slots,
            ranks={**self.ranks, **higher},
            scaled=self.scaled | {name for name, update in updates.items() if update.scale is not None},
        )


class AdapterSlots:
    """A model with slots for adapters, and the weights of another. model: its caches have the slot of each row
    (`KVCache.adapters`)."""

    def __init__(self, base: Model, capacity: AdapterCapacity) -> None:
        architecture = adaptable(base)
        self.capacity = capacity
        leaves, structure = pytree.tree_flatten(base.params, is_leaf=is_marked)
        modules = list(zip(part_names(architecture), leaves, strict=True))
        changed = {name: leaf for name, leaf in modules if name is not None and name in capacity.ranks}
        self._updates = _empty(changed, capacity, base)
        parts = [
            leaf if name is None or name not in self._updates else _adapted(leaf, self._updates[name])
            for name, leaf in modules
        ]
        self.model = replace(base, forward=AdaptedForward(architecture), params=pytree.tree_unflatten(parts, structure))

    def put(self, index: int, updates: Mapping[str, LoraUpdate]) -> None:
        """Write an adapter into an unused slot."""
        for name, stack in self._updates.items():
            stack.ranks[index] = 0
            if name in updates:
                _write(stack, index, updates[name])

    def copy(self, other: "AdapterSlots", indices: Iterable[int]) -> None:
        """Copy these slots from smaller stacks."""
        for index in indices:
            for name, source in other._updates.items():
                _copy(source, self._updates[name], index)


def _empty(parts: Mapping[str, Any], capacity: AdapterCapacity, base: Model) -> dict[str, Updates]:
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


def _write(stack: Updates, index: int, update: LoraUpdate) -> None:
    rank, a, b = update.rank, update.a, update.b
    if stack.factors is not None:
        (a, a_scales), (b, b_scales) = _rounded(a), _rounded(b)
        stack.factors[index, :rank] = a_scales * b_scales
    stack.a[index, :rank], stack.b[index, :rank] = a, b
    if stack.scale is not None and stack.shift is not None:
        stack.scale[index] = 1.0 if update.scale is None else update.scale
        stack.shift[index] = -0.0 if update.shift is None else update.shift  # adding it changes no bit
    stack.ranks[index] = rank


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Integers [R, K] from -127 to 127, and the scale [R] of each row."""
    largest = matrix.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / 127, 1.0)
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


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter that rows can use; its slot, `index`, is freed when no request uses it. digest: of its contents.
    folder: where it was read from."""

    name: str
    index: int
    digest: str
    folder: Path


class Adapters(Mapping[str, LoadedAdapter]):
    """The adapters of a model by name. run: the model; its `adapted`, set here, computes rows with adapters."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._by_name: dict[str, LoadedAdapter] = {}
        self._stacks: AdapterSlots | None = None
        self._free: list[int] = []
        self._freed: deque[int] = deque()  # since the last change; the garbage collector may add to it at any time
        self._max_index = 0  # ever used
        self._lock = threading.Lock()
        renew_in_forks(self)

    def __repr__(self) -> str:
        return described(self, *self._by_name)

    # Compared by identity, like models.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> LoadedAdapter:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter with this name; None for None.

        Raises:
            RequestError: there is none.
        """
        if name is None:
            return None
        loaded = self._by_name.get(name) if isinstance(name, str) else None
        if loaded is None:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise RequestError(f"there is no adapter {name!r}; loaded: {known} (lm.load_adapter loads one)")
        return loaded

    def by_digest(self, digest: str) -> LoadedAdapter | None:
        """An adapter with this digest, if loaded."""
        return next((loaded for loaded in self._by_name.values() if loaded.digest == digest), None)

    def load(self, name: str, adapter: Adapter, folder: Path) -> LoadedAdapter:
        """Load an adapter, without disturbing running requests.

        Raises:
            CheckpointError: it is for another model.
            RequestError: the name is taken, or the adapter cannot run beside this model's weights.
        """
        if not isinstance(name, str) or not name:
            raise RequestError(f"the name of an adapter must be a non-empty string; got {name!r}")
        updates = row_updates(self._run.model, adapter)
        digest = adapter.digest
        with self._lock:
            if name in self._by_name:
                raise RequestError(f"an adapter named {name!r} is already loaded: drop it first, or use another name")
            self._free += [self._freed.popleft() for _ in range(len(self._freed))]
            index = self._free[-1] if self._free else self._max_index + 1
            stacks = self._stacks
            capacity = (AdapterCapacity() if stacks is None else stacks.capacity).including(index, updates)
            if stacks is None or capacity != stacks.capacity:
                larger = AdapterSlots(self._run.model, capacity)
                if stacks is not None:
                    larger.copy(stacks, (used for used in range(1, self._max_index + 1) if used not in self._free))
                stacks = larger
            stacks.put(index, updates)
            if stacks is not self._stacks:
                self._stacks = stacks
                self._run.adapted = Run(stacks.model, self._run.compile)
            loaded = LoadedAdapter(name, index, digest, folder)
            self._free, self._max_index = self._free[:-1], max(index, self._max_index)
            weakref.finalize(loaded, self._freed.append, index).atexit = False
            self._by_name = {**self._by_name, name: loaded}
            return loaded

    def drop(self, name: str) -> None:
        """Reject further requests for this adapter. Running requests are not affected.

        Raises:
            RequestError: there is no adapter with this name.
        """
        with self._lock:
            self.find(name)
            self._by_name = {other: loaded for other, loaded in self._by_name.items() if other != name}

    def renew(self) -> None:
        """In a forked child: create a new lock. A load that another thread had started is lost here."""
        self._lock = threading.Lock()
