"""What a layer keeps of each position."""

from typing import NamedTuple


class LayerShape(NamedTuple):
    """Keys [num_kv_heads, key_dim] and values [num_kv_heads, value_dim] of a position.

    value_dim: 0 where values are a part of the keys, and nothing but keys is kept (multi-head latent attention).
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def features(self) -> int:
        """How many numbers that is."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)
