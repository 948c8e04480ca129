"""Recurrent states: what a layer keeps of a text in one piece, however long the text is.

Each slot has two places, for the states of two blocks of 16 positions, and `held` says of which (`onward.ops.state`).
So the states of the last 16 positions at least are there, and taking tokens back lowers an offset as it does elsewhere.
"""

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onward.cache.block_trie import NO_MATCH, BlockNode, Match
from onward.cache.budget import Budget
from onward.cache.buffers import lazy_zeros
from onward.ops.state import STATE_BLOCK

# The most slots of a memory, on a device where they take memory only as they are written, and on another.
_MOST_LAZY, _MOST = 1024, 32


class StateShape(NamedTuple):
    """What a layer keeps of a text: the inputs of a convolution of `taps` weights over `channels`, in the model's
    dtype, and for each of `heads` heads `width` numbers in float32."""

    channels: int
    taps: int
    heads: int
    width: int


class LayerState(NamedTuple):
    """The states of one layer, as the ops take them: inputs [N, 2, K - 1 + 16, C], state float32 [N, 2, H, width], held
    int32 [N, 2], rows int32 [B] or None."""

    inputs: Tensor
    state: Tensor
    held: Tensor
    rows: Tensor | None


def new_states(
    shapes: Sequence[StateShape], slots: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    """Empty states of `slots` slots: inputs and state of each layer, then `held`; nothing without layers."""
    if not shapes:
        return ()
    device = torch.device(device)
    inputs = [(shape.taps - 1 + STATE_BLOCK, shape.channels) for shape in shapes]
    states = [(shape.heads, shape.width) for shape in shapes]
    parts = zip(_parts(inputs, slots, dtype, device), _parts(states, slots, torch.float32, device), strict=True)
    held = torch.zeros(slots, 2, dtype=torch.int32, device=device)
    return *(part for layer in parts for part in layer), held


def _parts(sizes: Sequence[tuple[int, int]], slots: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """[N, 2, *size] for each size, over one buffer in which a slot is one run of memory."""
    widths = [rows * columns for rows, columns in sizes]
    buffer = lazy_zeros((slots, 2, sum(widths)), dtype, device)
    return [part.view(slots, 2, *size) for part, size in zip(torch.split(buffer, widths, -1), sizes, strict=True)]


def of_layer(states: Sequence[Tensor], layer: int, rows: Tensor | None) -> LayerState:
    """The states of one layer among those of `new_states`."""
    return LayerState(states[2 * layer], states[2 * layer + 1], states[-1], rows)


def holds(states: Sequence[Tensor], slot: int, positions: int) -> bool:
    """Whether a slot has the states after so many positions."""
    return not states or positions == 0 or -(-positions // STATE_BLOCK) in states[-1][slot].tolist()


class StateMemory:
    """Recurrent states of N slots, which texts take and give back. On the CPU they take memory when first written.

    count: N. tensors: as `new_states` makes them. nbytes: of one slot. block_nbytes: of the keys and values of a block.
    """

    def __init__(
        self,
        shapes: Sequence[StateShape],
        count: int,
        dtype: torch.dtype,
        device: torch.device | str,
        block_nbytes: int,
    ) -> None:
        self.block_nbytes = block_nbytes
        self.shapes = tuple(shapes)
        self.count = min(count, _MOST_LAZY if torch.device(device).type == "cpu" else _MOST)
        self.tensors = new_states(shapes, self.count, dtype, device)
        self.nbytes = sum(tensor[:1].nbytes for tensor in self.tensors)

    def clear(self, slot: int) -> None:
        """Let a slot hold nothing."""
        self.tensors[-1][slot] = 0

    def copy(self, source: int, to: int) -> None:
        for tensor in self.tensors:
            tensor[to] = tensor[source]

    def holds(self, slot: int, positions: int) -> bool:
        """Whether a slot has the states after so many positions."""
        return holds(self.tensors, slot, positions)

    def read(self, slot: int) -> tuple[Tensor, ...]:
        """A copy of one slot."""
        return tuple(tensor[slot : slot + 1].clone() for tensor in self.tensors)

    def write(self, slot: int, states: Sequence[Tensor]) -> None:
        """Take the states of one slot, as `read` gives them."""
        for tensor, new in zip(self.tensors, states, strict=True):
            tensor[slot] = new[0]


class StatePool:
    """Who has which slot of a memory of states: texts, and nodes of the trie that keep the states after their text.

    Where the model has no recurrent layers there is no memory: None stands for the slot of every text.

    most_kept: how many nodes keep states at most, in as much memory as `cached_blocks` take; the least recently used
    lets go of them first.
    """

    def __init__(self, memory: StateMemory | None, cached_blocks: int, budget: Budget) -> None:
        self.memory = memory
        self._budget = budget
        budget.states = weakref.proxy(self)
        self.free = list(range(0 if memory is None else memory.count))[::-1]
        affordable = 0 if memory is None else cached_blocks * memory.block_nbytes // memory.nbytes
        self.most_kept = 0 if memory is None else min(affordable, memory.count // 2)
        self.kept: OrderedDict[BlockNode, None] = OrderedDict()

    @property
    def used(self) -> int:
        """How many slots texts and nodes have."""
        return 0 if self.memory is None else self.memory.count - len(self.free)

    @property
    def is_full(self) -> bool:
        """Whether no text can be given states now."""
        return self.memory is not None and not self.free and not self.kept

    def take(self) -> int | None:
        """A slot that holds nothing."""
        if self.memory is None:
            return None
        self._budget.make_room(self._budget.prices.state)
        if not self.free:
            self.drop(next(iter(self.kept)))
        slot = self.free.pop()
        self.memory.clear(slot)
        return slot

    def fork(self, source: int | None) -> int | None:
        """A slot that holds what `source` does, that of a text."""
        slot = self.take()
        if self.memory is not None and source is not None and slot is not None:
            self.memory.copy(source, slot)
        return slot

    def give_back(self, slot: int | None) -> None:
        if slot is not None:
            self.free.append(slot)

    def holds(self, slot: int | None, positions: int) -> bool:
        """Whether the states after so many positions of a text are there."""
        return self.memory is None or slot is None or self.memory.holds(slot, positions)

    # What nodes keep

    def keep(self, node: BlockNode, slot: int, end: int) -> None:
        """Let a node keep the states in `slot`, which have seen `end` positions, in place of those that it has."""
        self.drop(node)
        node.state, node.state_end = slot, end
        self.kept[node] = None
        while len(self.kept) > self.most_kept:
            self.drop(next(iter(self.kept)))

    def snapshot(self, node: BlockNode, source: int, end: int) -> None:
        """Let a node keep a copy of the states of a text, if there is room for one."""
        if self.most_kept and self._can_copy and self.memory is not None:
            slot = self.fork(source)
            assert slot is not None
            if self._is_found(node):
                self.keep(node, slot, end)
            else:  # it made room for the copy
                self.free.append(slot)

    def fork_kept(self, node: BlockNode) -> int:
        """A slot that holds what a node keeps; the very one of the node where there is no room for another."""
        source = node.state
        assert source is not None
        del self.kept[node]  # for now, so that making room takes another
        node.state = None
        if not self._can_copy:
            return source
        copy = self.fork(source)
        assert copy is not None
        if self._is_found(node):
            node.state = source
            self.kept[node] = None
        else:
            self.free.append(source)
        return copy

    def _is_found(self, node: BlockNode) -> bool:
        return self._budget.blocks.nodes[node.block] is node

    @property
    def _can_copy(self) -> bool:
        return not self.is_full and self._budget.available >= self._budget.prices.state

    def drop(self, node: BlockNode) -> None:
        """Let a node keep no states."""
        if node.state is not None:
            del self.kept[node]
            self.free.append(node.state)
            node.state = None

    def reusable(self, match: Match, size: int) -> tuple[Match, BlockNode | None]:
        """The longest part of a match whose states a node keeps, and that node. size: positions of a block."""
        if self.memory is None:
            return match, None
        path, partial, common = match
        if partial is not None and self._keeps(partial, len(path) * size + common):
            return match, partial
        for depth in range(len(path), 0, -1):
            if self._keeps(path[depth - 1], depth * size):
                return Match(path[:depth], None, 0), path[depth - 1]
        return NO_MATCH, None

    def _keeps(self, node: BlockNode, positions: int) -> bool:
        return node.state is not None and positions <= node.state_end and self.holds(node.state, positions)

    def forget(self, held: Sequence[int | None]) -> None:
        """No node keeps any states, and all slots but these are free."""
        self.kept.clear()
        count = 0 if self.memory is None else self.memory.count
        self.free = [slot for slot in range(count - 1, -1, -1) if slot not in held]
