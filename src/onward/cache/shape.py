"""What a layer keeps of each position."""

from collections.abc import Sequence
from typing import NamedTuple

from onward.ops.blocks import BLOCK


class LayerShape(NamedTuple):
    """Keys [num_kv_heads, key_dim] and values [num_kv_heads, value_dim] of a position.

    value_dim: 0 where values are a part of the keys, and nothing but keys is kept (multi-head latent attention).
    window: how many positions a token of a sliding layer sees, itself included; None where it sees all of them.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    @property
    def features(self) -> int:
        """How many numbers that is."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def widest_window(shapes: Sequence[LayerShape]) -> int | None:
    """The longest window of the sliding layers, all of which keep that; None where no layer slides."""
    return max((shape.window for shape in shapes if shape.window is not None), default=None)


def window_blocks(window: int, block: int = BLOCK) -> int:
    """The most blocks of a sliding layer that a text has while forwards process up to `block` positions of it at once:
    those that the first of them sees, and those up to the last, wherever blocks begin."""
    return -(-(window - 1) // block) + 2


def first_seen(window: int, positions: int, block: int = BLOCK) -> int:
    """Where the block begins that holds the first position which a token at `positions` sees."""
    return max(0, positions - window + 1) // block * block


def without_windows(shapes: Sequence[LayerShape]) -> tuple[LayerShape, ...]:
    """The shapes of the same layers where all keep the whole text."""
    return tuple(shape._replace(window=None) for shape in shapes)


def without_useless_windows(shapes: Sequence[LayerShape], max_len: int | None) -> tuple[LayerShape, ...]:
    """The shapes without windows, where texts of up to `max_len` positions are no longer than what they would keep."""
    window = widest_window(shapes)
    if window is not None and max_len is not None and window_blocks(window) * BLOCK >= max_len:
        return without_windows(shapes)
    return tuple(shapes)


def kept_positions(shape: LayerShape, window: int | None, positions: int) -> int:
    """How many positions of a text a layer keeps in blocks. window: the widest one of the layers."""
    return positions if shape.window is None or window is None else min(positions, window_blocks(window) * BLOCK)
