"""Keys and values in blocks of 64 positions, so that rows may come and go without being copied.

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
from onward.ops.kv_write import BLOCK
from onward.util.text import described, in_bytes


class LayerPool:
    """Blocks 0 to `count` of these layers, of which the last holds nothing.

    layers: keys [N + 1, G, 64, D] and values [N + 1, G, 64, E] of each. block_nbytes: bytes of a block, all layers.
    """

    def __init__(self, buffer: Tensor, shapes: Sequence[LayerShape]) -> None:
        """buffer: [N + 1, features of a position * 64]: a block is one run of memory, the keys of each layer, then the
        values."""
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
        """Let the system take the memory of blocks that hold nothing (`KVPool.give_back`)."""
        if not is_lazy(self._buffer.nbytes, self._buffer.device):
            return
        for first, count in _runs(sorted(set(blocks))):
            give_back_pages(self._buffer.data_ptr() + first * self.block_nbytes, count * self.block_nbytes)


class WindowBlocks(LayerPool):
    """Blocks of sliding layers. window: how many positions a token sees, itself included; the most of any layer."""

    def __init__(self, buffer: Tensor, shapes: Sequence[LayerShape]) -> None:
        super().__init__(buffer, shapes)
        window = widest_window(shapes)
        assert window is not None, "sliding layers have windows"
        self.window = window


def _layers(buffer: Tensor, shapes: Sequence[LayerShape]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer as views of the buffer."""
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


class KVPool:
    """Memory for blocks of keys and values of every layer; a block takes memory when it is first written.

    count: how many blocks there are of the layers that keep the whole text. block_nbytes: bytes of one, all these
    layers. windows: the memory for blocks of the sliding layers, whose numbers are others; None without such. device:
    where it lies. states: the memory of recurrent layers; None without such.

    There is one block more of each kind, number `count`, which holds nothing. Tables name it where a row has no block:
    what pads rows that run together may be written there.
    """

    def __init__(
        self,
        buffer: Tensor,
        shapes: Sequence[LayerShape],
        states: RecurrentStatePool | None = None,
        of_windows: Tensor | None = None,
    ) -> None:
        """buffer: [N + 1, features of a position * 64]: a block is one run of memory, the keys of each layer, then the
        values. of_windows: the same of the sliding layers, in a number of blocks of its own; without it `buffer` has
        all layers, and these keep the whole text too."""
        self.shapes = tuple(shapes)
        self.states = states
        self.windows: WindowBlocks | None = None
        self._slides = slides = [of_windows is not None and shape.window is not None for shape in shapes]
        self._whole = LayerPool(buffer, [shape for shape, own in zip(shapes, slides, strict=True) if not own])
        self.count, self.block_nbytes, self.device = self._whole.count, self._whole.block_nbytes, self._whole.device
        kinds = [iter(self._whole.layers)]
        if of_windows is not None:
            self.windows = WindowBlocks(of_windows, [shape for shape in shapes if shape.window is not None])
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
        """Memory for `count` blocks of these layers, and for the recurrent ones that `states` names, of as many texts
        if that is not too many. On the CPU a large one takes memory only as it is written.

        windows: the number of blocks of the layers that slide; `count` by default.

        Raises:
            RequestError: the system refuses so much.
        """
        whole = [shape for shape in shapes if shape.window is None]
        block, of_windows = _block_of(whole), None
        # A block's parts lie apart by no more than their size: its first position touches all of its huge pages, and
        # its last one needs no more.
        buffer = lazy_zeros((count + 1, block), dtype, torch.device(device), huge_pages=True)
        if len(whole) < len(shapes):
            size = (1 + (count if windows is None else windows), _block_of(shapes) - block)
            of_windows = lazy_zeros(size, dtype, torch.device(device), huge_pages=True)
        memory = (
            RecurrentStatePool(states, count, dtype, device, _block_of(shapes) * dtype.itemsize) if states else None
        )
        return cls(buffer, shapes, memory, of_windows)

    def __repr__(self) -> str:
        facts = [f"{self.count} blocks of {BLOCK} positions", f"{in_bytes(self.block_nbytes)} each"]
        if self.windows is not None:
            facts.append(f"{self.windows.count} of sliding layers, {in_bytes(self.windows.block_nbytes)} each")
        return described(self, *facts)

    def view(self, table: Tensor, *more: Tensor) -> "PagedKVCache":
        """The cache of rows whose blocks the table int32 [B, M] names, over this memory.

        Every view has the same tensors, so that a program need not be bound anew to the next one.

        more: the table of the sliding layers' blocks, where there are such; then int32 [B], the slot of each row's
            states, where there are recurrent layers.
        """
        wanted = (self.windows is not None) + (self.states is not None)
        if len(more) != wanted:
            raise RequestError(
                "a view names the blocks of sliding layers where there are such, and a slot of states for each row "
                f"where there are recurrent layers: {wanted} tensors beside the table; got {len(more)}"
            )
        windows = more[:1] if self.windows is not None else ()
        for each in (table, *windows):
            if each.dim() != 2 or each.dtype != torch.int32 or each.stride(1) != 1:
                raise RequestError(
                    f"a table of blocks must be int32 [B, M] with contiguous rows; got {each.dtype} {list(each.shape)}"
                )
        states = () if self.states is None else (*self.states.tensors, more[-1])
        return PagedKVCache(self._keys, self._values, table, states, windows=windows)

    def read(self, place: Slot, positions: int) -> KVCache:
        """A copy of the first `positions` positions of a row, as a dense cache of one row. Sliding layers have those
        for which there are blocks, and zeros before them."""
        rows = [
            _side_by_side(layer, self._blocks_of(place, positions, slides))[:, :, :positions].contiguous()
            for layer, slides in zip((*self._keys, *self._values), self._slides * 2, strict=True)
        ]
        states = () if place.state is None or self.states is None else self.states.read(place.state)
        return KVCache(tuple(rows[: len(self._keys)]), tuple(rows[len(self._keys) :]), states)

    def write(self, place: Slot, cache: KVCache, positions: int) -> None:
        """Copy the first `positions` positions of a dense cache of one row to a place, as far as it has blocks for
        them, and its states."""
        ours, theirs = (*self._keys, *self._values), (*cache.keys, *cache.values)
        for own, layer, slides in zip(ours, theirs, self._slides * 2, strict=True):
            for number, block in enumerate(self._blocks_of(place, positions, slides)):
                first, last = number * BLOCK, min((number + 1) * BLOCK, positions)
                if block is not None:
                    own[block, :, : last - first] = layer[0, :, first:last]
        if place.state is not None and self.states is not None:
            self.states.write(place.state, cache.states)

    def _blocks_of(self, place: Slot, positions: int, slides: bool) -> list[int | None]:
        """The blocks of a layer's first positions; None where the place has none."""
        count = -(-positions // BLOCK)
        return [place.windows.get(index) for index in range(count)] if slides else list(place.blocks[:count])

    def copy(self, source: int, to: int, positions: int) -> None:
        """Copy the first `positions` positions of block `source` to block `to`, all layers that keep the whole text."""
        self._whole.copy(source, to, positions)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let the system take the memory of blocks that hold nothing; they need no other preparation to be used again.

        Memory of another device than the CPU, and a small one, stays as it is.
        """
        self._whole.give_back(blocks)


class PagedKVCache(NamedTuple):
    """Keys and values of every layer in blocks, and tables of the rows; a pytree of tensors. `KVPool.view` makes it.

    keys, values: a tensor [N, G, 64, D] a layer: N blocks, G key/value heads, 64 positions, D features.
    table: int32 [B, M], the block of each row's positions 64 m … 64 m + 63. Entries past the block of a row's last
        position are never read, and entries of a block at or past the row's offset neither.
    states: of the recurrent layers, if there are any (`onward.cache.kinds`), and int32 [B], the slot of each row.
    adapters: int32 [B], the index of each row's adapter, where some row has one (docs/adapters.md).
    windows: a table of the sliding layers' blocks, if these lie in blocks of their own. Entries before a row's window
        are never read either.
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
        """What the dimensions of each tensor count (`onward.program.NamedDims`)."""
        layer = ("blocks", "heads", "positions", "features")
        dims: list[tuple[str, ...]] = [layer] * (len(self.keys) + len(self.values)) + [("rows", "row's blocks")]
        if self.states:
            state = ("blocks", "places", "positions or heads", "features")
            dims += [*[state] * (len(self.states) - 2), ("blocks", "places"), ("rows",)]
        return [*dims, *[("rows",)] * len(self.adapters), *[("rows", "row's blocks")] * len(self.windows)]

    def blank(self) -> "PagedKVCache":
        """An empty cache of as many rows and positions, over memory of its own."""
        count, device = self.table.numel(), self.table.device
        buffers: dict[int, Tensor] = {}  # by the memory that layers lie in together
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
        # A sliding layer is one that attends within a window.
        table = self.table if window is None or not self.windows else self.windows[0]
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
    """How many numbers a block of these layers has."""
    return BLOCK * sum(shape.features for shape in shapes)


def _blank_slots(tensor: Tensor, count: int) -> Tensor:
    """Zeros of so many slots, with the strides of `tensor` [N, …]."""
    blank = torch.zeros(count * tensor.stride(0), dtype=tensor.dtype, device=tensor.device)
    return blank.as_strided((count, *tensor.shape[1:]), tensor.stride())


def _side_by_side(layer: Tensor, blocks: Sequence[int | None]) -> Tensor:
    """Blocks of a layer [N, G, 64, D] -> [1, G, 64 m, D]; zeros where there is none."""
    rows = layer.new_zeros((layer.shape[1], len(blocks), *layer.shape[2:]))
    for index, block in enumerate(blocks):
        if block is not None:
            rows[:, index] = layer[block]
    return rows.flatten(1, 2).unsqueeze(0)
