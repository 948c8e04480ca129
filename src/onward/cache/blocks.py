"""Keys and values in blocks of 64 positions, so that rows may come and go without being copied.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(arXiv 2309.06180).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.cache.buffers import is_lazy, lazy_zeros
from onward.cache.kv import KVCache
from onward.cache.shape import LayerShape
from onward.cache.states import LayerState, StateMemory, StateShape, of_layer
from onward.errors import RequestError
from onward.native import give_back_pages
from onward.ops.blocks import BLOCK
from onward.reprs import described, in_bytes


class KVBlocks:
    """Memory for N blocks of keys and values of every layer; a block takes memory when it is first written.

    count: N. block_nbytes: bytes of a block, all layers. device: where it lies. states: the memory of recurrent layers;
    None without such.

    There is one block more, number N, which holds nothing. Tables name it where a row has no block: what pads rows that
    run together may be written there.
    """

    def __init__(self, buffer: Tensor, shapes: Sequence[LayerShape], states: StateMemory | None = None) -> None:
        """buffer: [N + 1, features of a position * 64]: a block is one run of memory, the keys of each layer, then the
        values."""
        self.count: int = buffer.shape[0] - 1
        self.device = buffer.device
        self.block_nbytes: int = buffer[:1].nbytes
        self.shapes = tuple(shapes)
        self.states = states
        self._buffer = buffer
        layers = _layers(buffer, self.shapes)
        self._keys, self._values = layers[: len(shapes)], layers[len(shapes) :]

    @classmethod
    def new(
        cls,
        *,
        num_layers: int,
        count: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVBlocks":
        """Memory for `count` blocks of equal layers (`of`)."""
        shapes = [LayerShape(num_kv_heads, head_dim, head_dim)] * num_layers
        return cls.of(shapes, count=count, dtype=dtype, device=device)

    @classmethod
    def of(
        cls,
        shapes: Sequence[LayerShape],
        *,
        count: int,
        dtype: torch.dtype,
        device: torch.device | str,
        states: Sequence[StateShape] = (),
    ) -> "KVBlocks":
        """Memory for `count` blocks of these layers, and for the recurrent ones that `states` names, of as many texts
        if that is not too many. On the CPU a large one takes memory only as it is written.

        Raises:
            RequestError: the system refuses so much.
        """
        block = BLOCK * sum(shape.features for shape in shapes)
        # A block's parts lie apart by no more than their size: its first position touches all of its huge pages, and
        # its last one needs no more.
        memory = StateMemory(states, count, dtype, device, block * dtype.itemsize) if states else None
        return cls(lazy_zeros((count + 1, block), dtype, torch.device(device), huge_pages=True), shapes, memory)

    def __repr__(self) -> str:
        return described(self, f"{self.count} blocks of {BLOCK} positions", f"{in_bytes(self.block_nbytes)} each")

    def view(self, table: Tensor, rows: Tensor | None = None) -> "PagedKVCache":
        """The cache of rows whose blocks the table int32 [B, M] names, over this memory.

        Every view has the same tensors, so that a program need not be bound anew to the next one.

        rows: int32 [B], the slot of each row's states, where there are recurrent layers.
        """
        if table.dim() != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
            raise RequestError(
                f"a table of blocks must be int32 [B, M] with contiguous rows; got {table.dtype} {list(table.shape)}"
            )
        if (rows is None) != (self.states is None):
            raise RequestError("a view names a slot of states for each row where there are recurrent layers, else none")
        states = () if rows is None or self.states is None else (*self.states.tensors, rows)
        return PagedKVCache(self._keys, self._values, table, states)

    def read(self, blocks: Sequence[int], positions: int, state: int | None = None) -> KVCache:
        """A copy of the first `positions` positions of a row that lies in these blocks, as a dense cache of one row.

        state: the slot of its states, where there are recurrent layers.
        """
        used = list(blocks[: -(-positions // BLOCK)])
        rows = [_side_by_side(layer[used])[:, :, :positions].contiguous() for layer in (*self._keys, *self._values)]
        states = () if state is None or self.states is None else self.states.read(state)
        return KVCache(tuple(rows[: len(self._keys)]), tuple(rows[len(self._keys) :]), states)

    def write(self, blocks: Sequence[int], cache: KVCache, positions: int, state: int | None = None) -> None:
        """Copy the first `positions` positions of a dense cache of one row into these blocks, and its states into a
        slot of states."""
        for number, block in enumerate(blocks[: -(-positions // BLOCK)]):
            first, last = number * BLOCK, min((number + 1) * BLOCK, positions)
            for own, layer in zip((*self._keys, *self._values), (*cache.keys, *cache.values), strict=True):
                own[block, :, : last - first] = layer[0, :, first:last]
        if state is not None and self.states is not None:
            self.states.write(state, cache.states)

    def copy(self, source: int, to: int, positions: int) -> None:
        """Copy the first `positions` positions of block `source` to block `to`, all layers."""
        for layer in (*self._keys, *self._values):
            layer[to, :, :positions] = layer[source, :, :positions]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let the system take the memory of blocks that hold nothing; they need no other preparation to be used again.

        Memory of another device than the CPU, and a small one, stays as it is.
        """
        if not is_lazy(self._buffer.nbytes, self._buffer.device):
            return
        block = self._buffer[:1].nbytes
        for first, count in _runs(sorted(set(blocks))):
            give_back_pages(self._buffer.data_ptr() + first * block, count * block)


class PagedKVCache(NamedTuple):
    """Keys and values of every layer in blocks, and a table of the rows; a pytree of tensors. `KVBlocks.view` makes it.

    keys, values: a tensor [N, G, 64, D] a layer: N blocks, G key/value heads, 64 positions, D features.
    table: int32 [B, M], the block of each row's positions 64 m … 64 m + 63. Entries past the block of a row's last
        position are never read, and entries of a block at or past the row's offset neither.
    states: of the recurrent layers, if there are any (`onward.cache.states`), and int32 [B], the slot of each row.
    adapters: int32 [B], the index of each row's adapter, where some row has one (docs/adapters.md).
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    table: Tensor
    states: tuple[Tensor, ...] = ()
    adapters: tuple[Tensor, ...] = ()

    def __repr__(self) -> str:
        shape = list(self.keys[0].shape) if self.keys else []
        dtype = str(self.keys[0].dtype).removeprefix("torch.") if self.keys else ""
        rows = f"{self.batch} rows of {self.table.shape[1]} blocks"
        return described(self, rows, f"{len(self.keys)} layers of {shape} {dtype}")

    @property
    def batch(self) -> int:
        return self.table.shape[0]

    @property
    def max_len(self) -> int:
        return BLOCK * self.table.shape[1]

    @property
    def leaf_dims(self) -> list[tuple[str, ...]]:
        """What the dimensions of each tensor count (`onward.cache.sized.NamedDims`)."""
        layer = ("blocks", "heads", "positions", "features")
        dims: list[tuple[str, ...]] = [layer] * (len(self.keys) + len(self.values)) + [("rows", "row's blocks")]
        if self.states:
            state = ("blocks", "places", "positions or heads", "features")
            dims += [*[state] * (len(self.states) - 2), ("blocks", "places"), ("rows",)]
        return [*dims, *[("rows",)] * len(self.adapters)]

    def blank(self) -> "PagedKVCache":
        """An empty cache of as many rows and positions, over memory of its own."""
        layer = self.keys[0]
        shapes = [
            LayerShape(keys.shape[1], keys.shape[3], values.shape[3])
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        blocks = KVBlocks.of(shapes, count=self.table.numel(), dtype=layer.dtype, device=layer.device)
        table = torch.arange(blocks.count, dtype=torch.int32, device=layer.device).view(self.table.shape)
        if not self.states:
            return blocks.view(table)
        states = [_blank_slots(tensor, self.batch) for tensor in self.states[:-1]]
        rows = torch.arange(self.batch, dtype=torch.int32, device=layer.device)
        return blocks.view(table)._replace(states=(*states, rows))

    def state(self, layer: int) -> LayerState:
        """The states of a recurrent layer."""
        return of_layer(self.states[:-1], layer, self.states[-1])

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | int | None,
        offsets: Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store k and v [B, G, T, D] of a layer, then attend with q [B, H, T, D] (`KVCache.attend`)."""
        keys, values = self.keys[layer], self.values[layer]
        if k is not None:
            ops.write_cache(keys, k, offsets, self.table)
        if isinstance(v, int):
            values = keys[..., :v]
        elif v is not None:
            ops.write_cache(values, v, offsets, self.table)
        return ops.cached_attention(
            q, keys, values, offsets, table=self.table, window=window, scale=scale, sinks=sinks, softcap=softcap
        )


def _layers(buffer: Tensor, shapes: Sequence[LayerShape]) -> tuple[Tensor, ...]:
    """The keys of each layer [N + 1, G, 64, D], then the values, as views of the buffer."""
    widths = [(shape.num_kv_heads, shape.key_dim) for shape in shapes]
    widths += [(shape.num_kv_heads, shape.value_dim) for shape in shapes]
    parts = torch.split(buffer, [heads * BLOCK * width for heads, width in widths], dim=1)
    count = len(buffer)  # not -1: a part may have no features
    return tuple(part.view(count, heads, BLOCK, width) for part, (heads, width) in zip(parts, widths, strict=True))


def _blank_slots(tensor: Tensor, count: int) -> Tensor:
    """Zeros of so many slots, with the strides of `tensor` [N, …]."""
    blank = torch.zeros(count * tensor.stride(0), dtype=tensor.dtype, device=tensor.device)
    return blank.as_strided((count, *tensor.shape[1:]), tensor.stride())


def _side_by_side(blocks: Tensor) -> Tensor:
    """[m, G, 64, D] -> [1, G, 64 m, D]."""
    return blocks.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _runs(sorted_blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of neighbouring blocks."""
    runs: list[tuple[int, int]] = []
    for block in sorted_blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((block, 1))
    return runs
