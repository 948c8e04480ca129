"""What a layer keeps of each position."""

from typing import NamedTuple


class LayerShape(NamedTuple):
    """Keys [num_kv_heads, key_dim] and values [num_kv_heads, value_dim] of a position."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def features(self) -> int:
        """How many numbers that is."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)
