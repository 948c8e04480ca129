"""Blocks of some layers in one buffer: the layers that keep the whole text, or those that slide."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.cache.buffers import is_lazy
from onward.cache.shape import LayerShape, widest_window
from onward.native import give_back_pages
from onward.ops.blocks import BLOCK


class LayerBlocks:
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
        """Let the system take the memory of blocks that hold nothing (`KVBlocks.give_back`)."""
        if not is_lazy(self._buffer.nbytes, self._buffer.device):
            return
        for first, count in _runs(sorted(set(blocks))):
            give_back_pages(self._buffer.data_ptr() + first * self.block_nbytes, count * self.block_nbytes)


class WindowBlocks(LayerBlocks):
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
