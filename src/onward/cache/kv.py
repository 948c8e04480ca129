"""The dense key/value cache: one buffer of `max_len` positions a row, written in place.

Entries at or past a row's offset are never read. Taking tokens back only lowers the offset: nothing is moved or
cleared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.cache.buffers import lazy_zeros
from onward.cache.shape import LayerShape
from onward.cache.states import LayerState, StateShape, holds, new_states, of_layer
from onward.reprs import described, in_bytes


class KVCache(NamedTuple):
    """Keys and values of every layer; a pytree of fixed-shape tensors.

    keys, values: a tensor [B, G, S, D] a layer: B rows, G key/value heads, S = max_len positions, D features.
    states: of the recurrent layers, if there are any (`onward.cache.states`), of slot b for row b.
    adapters: int32 [B], the index of each row's adapter, where some row has one (docs/adapters.md).
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    states: tuple[Tensor, ...] = ()
    adapters: tuple[Tensor, ...] = ()

    @classmethod
    def new(
        cls,
        *,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVCache":
        """An empty cache of equal layers (`of`)."""
        shapes = [LayerShape(num_kv_heads, head_dim, head_dim)] * num_layers
        return cls.of(shapes, batch=batch, max_len=max_len, dtype=dtype, device=device)

    @classmethod
    def of(
        cls,
        shapes: Sequence[LayerShape],
        *,
        batch: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
        states: Sequence[StateShape] = (),
    ) -> "KVCache":
        """An empty cache of these layers, all in one buffer, and of the recurrent ones that `states` names. A large one
        takes memory only as it is written."""
        widths = [*((shape.num_kv_heads, shape.key_dim) for shape in shapes)]
        widths += [(shape.num_kv_heads, shape.value_dim) for shape in shapes]
        sizes = [batch * heads * max_len * width for heads, width in widths]
        parts = torch.split(lazy_zeros((sum(sizes),), dtype, torch.device(device)), sizes)
        layers = tuple(
            part.view(batch, heads, max_len, width) for part, (heads, width) in zip(parts, widths, strict=True)
        )
        return cls(layers[: len(shapes)], layers[len(shapes) :], new_states(states, batch, dtype, device))

    def __repr__(self) -> str:
        shape = list(self.keys[0].shape) if self.keys else []
        dtype = str(self.keys[0].dtype).removeprefix("torch.") if self.keys else ""
        return described(self, f"{len(self.keys)} layers of {shape} {dtype}", in_bytes(self.nbytes))

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    @property
    def max_len(self) -> int:
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values, *self.states))

    def copy_row(self, source: int, to: int, positions: int) -> None:
        """Copy the first `positions` positions of row `source` to row `to`."""
        for layer in (*self.keys, *self.values):
            layer[to, :, :positions] = layer[source, :, :positions]
        for state in self.states:
            state[to] = state[source]

    def holds(self, row: int, positions: int) -> bool:
        """Whether the states after so many positions of a row are there; without recurrent layers all are."""
        return holds(self.states, row, positions)

    def first_rows(self, batch: int) -> "KVCache":
        """The cache of the first `batch` rows, over the same memory."""
        return KVCache(*(tuple(layer[:batch] for layer in part) for part in self))

    def state(self, layer: int) -> LayerState:
        """The states of a recurrent layer."""
        return of_layer(self.states, layer, None)

    def write(self, layer: int, k: Tensor, v: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [B, G, T, D] of a layer at positions from `offsets` int32 [B] on; return its whole buffers.

        Raises:
            RequestError: as `ops.write_cache`, for one where a gradient is wanted.
        """
        keys, values = self.keys[layer], self.values[layer]
        ops.write_cache(keys, k, offsets)
        ops.write_cache(values, v, offsets)
        return keys, values

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
        """Store k and v [B, G, T, D] of a layer, then attend with q [B, H, T, D] (`ops.cached_attention`).

        k, v: None for q of another layer than the one whose keys and values these are, after that one has stored them.
            v is a number E where values are the first E features of the keys, and not stored themselves.
        """
        keys, values = self.keys[layer], self.values[layer]
        if k is not None:
            ops.write_cache(keys, k, offsets)
        if isinstance(v, int):
            values = keys[..., :v]
        elif v is not None:
            ops.write_cache(values, v, offsets)
        return ops.cached_attention(q, keys, values, offsets, window=window, scale=scale, sinks=sinks, softcap=softcap)
