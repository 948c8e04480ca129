"""Keys and values in blocks of 64 positions, so that rows can be added and removed without copies.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(arXiv 2309.06180).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.cache.dense import KVCache
from onward.cache.kinds import (
    LayerShape,
    RecurrentState,
    RecurrentStatePool,
    StateShape,
    is_lazy,
    lazy_zeros,
    of_layer,
    widest_window,
)
from onward.cache.slot import Slot
from onward.errors import RequestError
from onward.native import give_back_pages
from onward.ops.heads import BLOCK
from onward.util.text import described, in_bytes


class LayerPool:
    """Blocks 0 to `count` of these layers; the last one is a spare that holds nothing.

    layers: keys [N + 1, G, 64, D] and values [N + 1, G, 64, E] of each. block_nbytes: bytes of a block, all layers.
    """

    def __init__(self, buffer: Tensor, shapes: Sequence[LayerShape]) -> None:
        """buffer: [N + 1, features of a position * 64]: a block is contiguous, all layers' keys, then all values."""
        self.count: int = buffer.shape[0] - 1
        self.block_nbytes: int = buffer[:1].nbytes
        self.device = buffer.device
        self.layers = _layers(buffer, shapes)
        self._buffer = buffer

    def copy(self, source: int, to: int, positions: int) -> None:
        """Copy the first `positions` positions of block `source` to block `to`, all layers."""
        for layer in (each for pair in self.layers for each in pair):
            layer[to, :, :positions] = layer[source, :, :positions]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return the memory of free blocks to the system; they can be used again as they are.

        Small buffers, and memory of other devices than the CPU, stay as they are.
        """
        if not is_lazy(self._buffer.nbytes, self._buffer.device):
            return
        for first, count in _runs(sorted(set(blocks))):
            give_back_pages(self._buffer.data_ptr() + first * self.block_nbytes, count * self.block_nbytes)


class WindowBlocks(LayerPool):
    """Sliding-window blocks. window: the most positions a token sees in any layer, itself included."""

    def __init__(self, buffer: Tensor, shapes: Sequence[LayerShape]) -> None:
        super().__init__(buffer, shapes)
        window = widest_window(shapes)
        assert window is not None, "sliding layers have windows"
        self.window = window


def _layers(buffer: Tensor, shapes: Sequence[LayerShape]) -> list[tuple[Tensor, Tensor]]:
    if not shapes:
        return []
    widths = [(shape.num_kv_heads, shape.key_dim) for shape in shapes]
    widths += [(shape.num_kv_heads, shape.value_dim) for shape in shapes]
    parts = torch.split(buffer, [heads * BLOCK * width for heads, width in widths], dim=1)
    count = len(buffer)  # not -1: a part may have no features
    views = [part.view(count, heads, BLOCK, width) for part, (heads, width) in zip(parts, widths, strict=True)]
    return list(zip(views[: len(shapes)], views[len(shapes) :], strict=True))


def _runs(sorted_blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of neighbouring blocks."""
    runs: list[tuple[int, int]] = []
    for block in sorted_blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((block, 1))
    return runs


class KVPool(LayerPool):
    """Memory for blocks of keys and values of every layer; a block takes memory when it is first written.

    count, block_nbytes, layers: of the full-attention blocks. windows: the sliding-window blocks, numbered separately,
    if any. states: the recurrent states, if any.

    Each kind has a spare block, number `count`. Block tables name it where a row has no block, so padding may be
    written there.
    """

    def __init__(
        self,
        buffer: Tensor,
        shapes: Sequence[LayerShape],
        states: RecurrentStatePool | None = None,
        window_buffer: Tensor | None = None,
    ) -> None:
        """buffer: as in `LayerPool`. window_buffer: the same for the sliding layers; without it, `buffer` has all
        layers."""
        self.shapes = tuple(shapes)
        self.states = states
        self.windows: WindowBlocks | None = None
        self._slides = slides = [window_buffer is not None and shape.window is not None for shape in shapes]
        super().__init__(buffer, [shape for shape, own in zip(shapes, slides, strict=True) if not own])
        kinds = [iter(self.layers)]
        if window_buffer is not None:
            self.windows = WindowBlocks(window_buffer, [shape for shape in shapes if shape.window is not None])
            kinds.append(iter(self.windows.layers))
        layers = [next(kinds[own]) for own in slides]
        self._keys, self._values = tuple(keys for keys, _ in layers), tuple(values for _, values in layers)

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
    ) -> "KVPool":
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
        windows: int | None = None,
    ) -> "KVPool":
        """Memory for `count` blocks of these layers and for recurrent states of up to as many sequences. On the CPU, a
        large pool takes memory only as it is written.

        windows: the number of sliding-window blocks; `count` by default.

        Raises:
            RequestError: the system refuses the allocation.
        """
        block, window_buffer = _block_of([shape for shape in shapes if shape.window is None]), None
        # A block's parts are no further apart than their size: its first position touches all of its huge pages, and
        # its last one needs no more.
        buffer = lazy_zeros((count + 1, block), dtype, torch.device(device), huge_pages=True)
        if widest_window(shapes) is not None:
            size = (1 + (count if windows is None else windows), _block_of(shapes) - block)
            window_buffer = lazy_zeros(size, dtype, torch.device(device), huge_pages=True)
        block_nbytes = _block_of(shapes) * dtype.itemsize
        pool = RecurrentStatePool(states, count, dtype, device, block_nbytes) if states else None
        return cls(buffer, shapes, pool, window_buffer)

    def __repr__(self) -> str:
        facts = [f"{self.count} blocks of {BLOCK} positions", f"{in_bytes(self.block_nbytes)} each"]
        if self.windows is not None:
            facts.append(f"{self.windows.count} of sliding layers, {in_bytes(self.windows.block_nbytes)} each")
        return described(self, *facts)

    def view(self, table: Tensor, *more: Tensor) -> "PagedKVCache":
        """The cache of the rows of a block table int32 [B, M], over this memory.

        All views have the same tensors, so a program need not be bound again for the next one.

        more: the block table of the sliding layers, if any; then int32 [B], the slot of each row's recurrent states,
            if any.
        """
        count = (self.windows is not None) + (self.states is not None)
        if len(more) != count:
            raise RequestError(
                "a view needs a block table for sliding layers, and a state slot per row for recurrent layers: "
                f"{count} tensors besides the table; got {len(more)}"
            )
        windows = more[:1] if self.windows is not None else ()
        for each in (table, *windows):
            if each.dim() != 2 or each.dtype != torch.int32 or each.stride(1) != 1:
                raise RequestError(
                    f"a block table must be int32 [B, M] with contiguous rows; got {each.dtype} {list(each.shape)}"
                )
        states = () if self.states is None else (*self.states.tensors, more[-1])
        return PagedKVCache(self._keys, self._values, table, states, windows=windows)

    def read(self, place: Slot, positions: int) -> KVCache:
        """A copy of a slot's first positions as a dense cache of one row. Sliding layers are zero where the slot has no
        blocks."""
        rows = [
            _side_by_side(layer, self._blocks_of(place, positions, slides))[:, :, :positions].contiguous()
            for layer, slides in zip((*self._keys, *self._values), self._slides * 2, strict=True)
        ]
        states = () if place.state is None or self.states is None else self.states.read(place.state)
        return KVCache(tuple(rows[: len(self._keys)]), tuple(rows[len(self._keys) :]), states)

    def write(self, place: Slot, cache: KVCache, positions: int) -> None:
        """Copy the states and the first positions of a dense cache of one row to a slot's blocks."""
        ours, theirs = (*self._keys, *self._values), (*cache.keys, *cache.values)
        for own, layer, slides in zip(ours, theirs, self._slides * 2, strict=True):
            for number, block in enumerate(self._blocks_of(place, positions, slides)):
                first, last = number * BLOCK, min((number + 1) * BLOCK, positions)
                if block is not None:
                    own[block, :, : last - first] = layer[0, :, first:last]
        if place.state is not None and self.states is not None:
            self.states.write(place.state, cache.states)

    def _blocks_of(self, place: Slot, positions: int, slides: bool) -> list[int | None]:
        """The blocks of a layer's first positions; None if the slot has none."""
        count = -(-positions // BLOCK)
        return [place.windows.get(index) for index in range(count)] if slides else list(place.blocks[:count])


class PagedKVCache(NamedTuple):
    """Keys and values of every layer in blocks, with block tables; a pytree of tensors from `KVPool.view`.

    keys, values: a tensor [N, G, 64, D] per layer: N blocks, G key/value heads, 64 positions, D features.
    table: int32 [B, M], the block of each row's positions 64 m … 64 m + 63. Entries past a row's last position, and
        positions at or past its offset, are never read.
    states: of the recurrent layers, if any (`onward.cache.kinds`), and int32 [B], the slot of each row.
    adapters: int32 [B], the index of each row's adapter, if any row has one (docs/adapters.md).
    windows: the block table of the sliding layers, if they have their own blocks. Entries before a row's window are
        never read.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    table: Tensor
    states: tuple[Tensor, ...] = ()
    adapters: tuple[Tensor, ...] = ()
    windows: tuple[Tensor, ...] = ()

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
        """The names of each tensor's dimensions (`onward.program.NamedDims`)."""
        layer = ("blocks", "heads", "positions", "features")
        dims: list[tuple[str, ...]] = [layer] * (len(self.keys) + len(self.values)) + [("rows", "row's blocks")]
        if self.states:
            state = ("blocks", "places", "positions or heads", "features")
            dims += [*[state] * (len(self.states) - 2), ("blocks", "places"), ("rows",)]
        return [*dims, *[("rows",)] * len(self.adapters), *[("rows", "row's blocks")] * len(self.windows)]

    def blank(self) -> "PagedKVCache":
        """An empty cache of the same size with its own memory."""
        count, device = self.table.numel(), self.table.device
        buffers: dict[int, Tensor] = {}  # by the memory that layers share
        layers = []
        for leaf in (*self.keys, *self.values):
            memory = leaf.untyped_storage().data_ptr()
            if memory not in buffers:
                buffers[memory] = lazy_zeros(((count + 1) * leaf.stride(0),), leaf.dtype, leaf.device, huge_pages=True)
            layers.append(
                buffers[memory].as_strided((count + 1, *leaf.shape[1:]), leaf.stride(), leaf.storage_offset())
            )
        table = torch.arange(count, dtype=torch.int32, device=device).view(self.table.shape)
        states = [_blank_slots(tensor, self.batch) for tensor in self.states[:-1]]
        if states:
            states.append(torch.arange(self.batch, dtype=torch.int32, device=device))
        keys, values = tuple(layers[: len(self.keys)]), tuple(layers[len(self.keys) :])
        return PagedKVCache(keys, values, table, tuple(states), windows=(table,) * len(self.windows))

    def state(self, layer: int) -> RecurrentState:
        """The states of a recurrent layer, counted among the recurrent layers."""
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
        # A sliding layer is one that attends within a window.
        table = self.table if window is None or not self.windows else self.windows[0]
        keys, values = self.keys[layer], self.values[layer]
        if k is not None:
            ops.write_cache(keys, k, offsets, table)
        if isinstance(v, int):
            values = keys[..., :v]
        elif v is not None:
            ops.write_cache(values, v, offsets, table)
        return ops.cached_attention(
            q, keys, values, offsets, table=table, window=window, scale=scale, sinks=sinks, softcap=softcap
        )


def _block_of(shapes: Sequence[LayerShape]) -> int:
    return BLOCK * sum(shape.features for shape in shapes)


def _blank_slots(tensor: Tensor, count: int) -> Tensor:
    """Zeros of `count` slots, with the strides of `tensor` [N, …]."""
    blank = torch.zeros(count * tensor.stride(0), dtype=tensor.dtype, device=tensor.device)
    return blank.as_strided((count, *tensor.shape[1:]), tensor.stride())


def _side_by_side(layer: Tensor, blocks: Sequence[int | None]) -> Tensor:
    """Blocks of a layer [N, G, 64, D] -> [1, G, 64 m, D]; zeros for None."""
    rows = layer.new_zeros((layer.shape[1], len(blocks), *layer.shape[2:]))
    for index, block in enumerate(blocks):
        if block is not None:
            rows[:, index] = layer[block]
    return rows.flatten(1, 2).unsqueeze(0)
