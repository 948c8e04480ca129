"""Keys and values in blocks of 64 positions, so that rows can be added and removed without copies; and the block tables
that name each row's blocks.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(arXiv 2309.06180).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from onward.cache.dense import AdaptedCache, AttentionOptions, KVCache, layers_of, write_and_attend, write_features
from onward.cache.plan import (
    CachePlan,
    RecurrentState,
    RecurrentStatePool,
    as_bytes,
    copied_bytes,
    is_lazy,
    lazy_zeros,
    load_bytes,
    of_layer,
    widest_window,
)
from onward.cache.slot import RELEASED, Slot, index_of
from onward.errors import RequestError
from onward.native import give_back_pages
from onward.ops.heads import BLOCK
from onward.util.text import described, in_bytes


class LayerPool:
    """Blocks 0 to `count` of a plan's layers; the last one is a spare that holds nothing.

    layers: keys [N + 1, G, 64, D] and values [N + 1, G, 64, E] of each. block_nbytes: bytes of a block, all layers.
    window: of sliding layers, the most positions that a token sees in any of them, itself included; otherwise 0.
    """

    def __init__(self, plan: CachePlan, count: int) -> None:
        self._buffer, keys, values = plan.new_layers(count + 1, BLOCK, by_row=True)
        self.layers = list(zip(keys, values, strict=True))
        self.count, self.block_nbytes, self.device = count, plan.block_nbytes, self._buffer.device
        self.window = widest_window(plan.shapes) or 0

    def copy(self, source: int, to: int, positions: int) -> None:
        """Copy the first `positions` positions of block `source` to block `to`, all layers."""
        for layer in (each for pair in self.layers for each in pair):
            layer[to, :, :positions] = layer[source, :, :positions]

    def dump(self, block: int, positions: int = BLOCK) -> memoryview:
        """A copy of the bytes of a block's first positions, all layers; those of the others are zero."""
        copy = copied_bytes([self._buffer[block]])
        if positions < BLOCK:
            row = torch.frombuffer(copy, dtype=self._buffer.dtype)
            for layer in (each for pair in self.layers for each in pair):
                row.as_strided(layer.shape[1:], layer.stride()[1:], layer.storage_offset())[:, positions:] = 0
        return copy

    def writable(self, block: int) -> memoryview | None:
        """A block's bytes themselves; None on another device than the CPU."""
        return as_bytes(self._buffer[block]) if self.device.type == "cpu" else None

    def load(self, block: int, content: memoryview) -> None:
        """Overwrite a block with the bytes of `dump`."""
        load_bytes([self._buffer[block]], content)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return the memory of free blocks to the system; they can be used again as they are.

        Small buffers, and memory of other devices than the CPU, stay as they are.
        """
        if not is_lazy(self._buffer.nbytes, self._buffer.device):
            return
        for first, count in _runs(sorted(set(blocks))):
            give_back_pages(self._buffer.data_ptr() + first * self.block_nbytes, count * self.block_nbytes)


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
    if any. states: the recurrent states, if any, of up to `count` sequences. plan: of all of them.

    Each kind has a spare block, number `count`. Block tables name it where a row has no block, so padding may be
    written there.
    """

    def __init__(self, plan: CachePlan, count: int, windows: int | None = None) -> None:
        """windows: the number of sliding-window blocks; `count` by default.

        Raises:
            RequestError: the system refuses the allocation.
        """
        self.plan = plan
        self._slides = [shape.window is not None for shape in plan.shapes]
        own, sliding = (
            replace(plan, shapes=tuple(shape for shape in plan.shapes if (shape.window is not None) is slides))
            for slides in (False, True)
        )
        super().__init__(own, count)
        self.windows = LayerPool(sliding, count if windows is None else windows) if sliding.shapes else None
        kinds = iter(self.layers), iter(() if self.windows is None else self.windows.layers)
        layers = [next(kinds[slides]) for slides in self._slides]
        self._keys, self._values = tuple(keys for keys, _ in layers), tuple(values for _, values in layers)
        self.states = RecurrentStatePool(plan, count) if plan.states else None

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

    def read_keys(self, place: Slot, layer: int, first: int, last: int) -> Tensor:
        """The keys of a layer without a window at the positions first … last - 1 of a slot, [G, N, width]."""
        blocks = place.blocks[first // BLOCK : -(-last // BLOCK)]
        start = first % BLOCK
        return _side_by_side(self._keys[layer], blocks)[0, :, start : start + last - first]

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
    states: of the recurrent layers, if any (`onward.cache.plan`), and int32 [B], the slot of each row.
    windows: the block table of the sliding layers, if they have their own blocks. Entries before a row's window are
        never read.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    table: Tensor
    states: tuple[Tensor, ...] = ()
    windows: tuple[Tensor, ...] = ()

    def __repr__(self) -> str:
        return described(self, f"{self.batch} rows of {self.table.shape[1]} blocks", layers_of(self.keys))

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
        return [*dims, *[("rows", "row's blocks")] * len(self.windows)]

    def blank(self) -> "PagedKVCache":
        """An empty cache of the same size with its own memory."""
        count, device = self.table.numel(), self.table.device
        layers = _blank((*self.keys, *self.values), count + 1)
        table = torch.arange(count, dtype=torch.int32, device=device).view(self.table.shape)
        states = _blank(self.states[:-1], self.batch)
        if states:
            states = (*states, torch.arange(self.batch, dtype=torch.int32, device=device))
        keys, values = layers[: len(self.keys)], layers[len(self.keys) :]
        return PagedKVCache(keys, values, table, states, windows=(table,) * len(self.windows))

    def state(self, layer: int) -> RecurrentState:
        """The states of a recurrent layer, counted among the recurrent layers."""
        return of_layer(self.states[:-1], layer, self.states[-1])

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, offsets: Tensor,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:  # fmt: skip
        """Store k and v [B, G, T, D] of a layer, then attend with q [B, H, T, D] (`KVCache.attend`)."""
        # A sliding layer is one that attends within a window.
        table = self.table if options.get("window") is None or not self.windows else self.windows[0]
        return write_and_attend(self.keys[layer], self.values[layer], table, q, k, v, offsets, options)

    def store(self, layer: int, x: Tensor, offsets: Tensor) -> None:
        """Store x [B, T, D], the values at a tap, in the keys of a layer."""
        write_features(self.keys[layer], self.table, x, offsets)


def _blank(tensors: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
    """Zeros [count, …] with the strides of these tensors [N, …]. Those that share memory share it again."""
    memories = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    of_memory = dict(zip(memories, tensors, strict=True)).items()
    new = {at: lazy_zeros((count * x.stride(0),), x.dtype, x.device, huge_pages=True) for at, x in of_memory}
    pairs = zip(memories, tensors, strict=True)
    return tuple(new[at].as_strided((count, *x.shape[1:]), x.stride(), x.storage_offset()) for at, x in pairs)


def _side_by_side(layer: Tensor, blocks: Sequence[int | None]) -> Tensor:
    """Blocks of a layer [N, G, 64, D] -> [1, G, 64 m, D]; zeros for None."""
    rows = layer.new_zeros((layer.shape[1], len(blocks), *layer.shape[2:]))
    for index, block in enumerate(blocks):
        if block is not None:
            rows[:, index] = layer[block]
    return rows.flatten(1, 2).unsqueeze(0)


class _Table(NamedTuple):
    """A block table for some number of rows.

    host: int32 [B, K * M]: M full-attention blocks, then M sliding-window blocks, if any. device: the same on the
    pool's device. states, adapters: int32 [B] there, each row's block of states and adapter index. stamps: of the slot
    that each row was written for; -1 for none.
    """

    host: Tensor
    device: Tensor
    states: Tensor
    adapters: Tensor
    stamps: list[int]


class BlockTableTensors:
    """Views of a pool through tables of `width` blocks per row. Consecutive forwards over the same rows reuse the
    tensors: only changed rows are written.

    Batch sizes up to the same power of two share a table, so rows that end one by one need no table each.
    """

    def __init__(self, memory: KVPool, width: int) -> None:
        self._memory, self._width = memory, width
        self._spares = [memory.count] if memory.windows is None else [memory.count, memory.windows.count]
        self._tables: dict[int, _Table] = {}
        self._caches: dict[tuple[int, bool], Any] = {}
        self._views = 0

    def views(self) -> int:
        """The number of calls of `view`."""
        return self._views

    def view(self, slots: Sequence[Slot]) -> Any:
        """The cache of these rows, valid until the next call; the same object while rows stay. Entries without a block
        name the spare block."""
        self._views += 1
        batch = len(slots)
        stamps = [slot.stamp for slot in slots]
        adapters = [index_of(slot.adapter) for slot in slots]
        key = batch, any(adapters)
        table = self._table(batch)
        if table.stamps[:batch] != stamps:
            for row, slot in enumerate(slots):
                if table.stamps[row] != slot.stamp:
                    assert slot.stamp, RELEASED
                    table.stamps[row] = -1  # until it is complete, in case of an interrupt
                    self._write(table, row, slot, adapters[row])
                    table.stamps[row] = slot.stamp
        if key not in self._caches:
            states = () if self._memory.states is None else (table.states[:batch],)
            cache = self._memory.view(*torch.split(table.device[:batch], self._width, 1), *states)
            self._caches[key] = AdaptedCache(cache, table.adapters[:batch]) if key[1] else cache
        return self._caches[key]

    def _write(self, table: _Table, row: int, slot: Slot, adapter: int) -> None:
        host = table.host.numpy()[row]
        host[: len(slot.blocks)] = slot.blocks
        host[len(slot.blocks) : self._width] = self._spares[0]
        if len(self._spares) > 1:
            windows = host[self._width :]
            windows[:] = self._spares[1]
            windows[list(slot.windows)] = list(slot.windows.values())
        if table.device is not table.host:
            table.device[row].copy_(table.host[row])
        if slot.state is not None:
            table.states[row] = slot.state
        table.adapters[row] = adapter

    def _table(self, batch: int) -> _Table:
        rows = 1 << max(batch - 1, 0).bit_length()
        if rows not in self._tables:
            host = torch.zeros(rows, len(self._spares) * self._width, dtype=torch.int32)
            device = host if self._memory.device.type == "cpu" else host.to(self._memory.device)
            states, adapters = torch.zeros(2, rows, dtype=torch.int32, device=device.device)
            self._tables[rows] = _Table(host, device, states, adapters, [-1] * rows)
        return self._tables[rows]
