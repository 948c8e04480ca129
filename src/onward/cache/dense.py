"""The dense KV cache: one buffer of `max_len` positions per row, written in place; the dimensions of other caches; and
any cache with the adapter of each row.

Entries at or past a row's offset are never read. Removing tokens only lowers the offset: nothing is moved or cleared.

Any cache is a pytree of tensors whose sizes depend on its number of positions. So comparing two caches of different
lengths finds the position dimension.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward import ops
from onward.cache.plan import CachePlan, LayerShape, RecurrentState, holds, new_states, of_layer
from onward.util.text import described, in_bytes


def position_dims(cache: Any, length: int, other: Any, other_length: int) -> list[int | None] | None:
    """For each leaf of `cache`, the dimension of its `length` positions; None for a leaf without one. None if a leaf is
    not a tensor, or if `other`, a cache of the same model and batch, differs in more than its length."""
    leaves, structure = pytree.tree_flatten(cache)
    other_leaves, other_structure = pytree.tree_flatten(other)
    if structure != other_structure or length == other_length:
        return None
    dims: list[int | None] = []
    for leaf, other_leaf in zip(leaves, other_leaves, strict=True):
        if not isinstance(leaf, Tensor) or not isinstance(other_leaf, Tensor) or leaf.dtype != other_leaf.dtype:
            return None
        if leaf.shape == other_leaf.shape:
            dims.append(None)
            continue
        if leaf.dim() != other_leaf.dim():
            return None
        differing = [dim for dim in range(leaf.dim()) if leaf.shape[dim] != other_leaf.shape[dim]]
        if len(differing) != 1 or (leaf.shape[differing[0]], other_leaf.shape[differing[0]]) != (length, other_length):
            return None
        dims.append(differing[0])
    return dims


def first_positions(leaf: Tensor, dim: int | None, count: int) -> Tensor:
    """A view of the first `count` positions of a cache's tensor; the whole tensor if `dim` is None."""
    return leaf if dim is None else leaf.narrow(dim, 0, count)


def copy_positions(cache: Any, to: Any, dims: list[int | None], count: int) -> None:
    """Copy the first `count` positions of `cache` to `to`. dims: from `position_dims`."""
    for source, target, dim in zip(pytree.tree_leaves(cache), pytree.tree_leaves(to), dims, strict=True):
        first_positions(target, dim, count).copy_(first_positions(source, dim, count))


def row_dims(new_cache: Callable[[int, int], Any]) -> list[int] | None:
    """For each leaf of the caches from `new_cache` (batch, max_len), the row dimension. None if a leaf is not a tensor
    or has no single dimension that grows with the batch."""
    dims = position_dims(new_cache(1, 8), 1, new_cache(2, 8), 2)  # any number of positions works
    batch_dims = [dim for dim in dims or () if dim is not None]
    return None if dims is None or len(batch_dims) < len(dims) else batch_dims


def have_rows(cache: Any, dims: Sequence[int], batch: int) -> bool:
    """Whether each leaf of `cache` is a tensor with `batch` rows. dims: from `row_dims`."""
    leaves = pytree.tree_leaves(cache)
    return len(leaves) == len(dims) and all(
        isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == batch
        for leaf, dim in zip(leaves, dims, strict=True)
    )


def copy_row(cache: Any, dims: Sequence[int], source: int, to: int) -> None:
    for leaf, dim in zip(pytree.tree_leaves(cache), dims, strict=True):
        leaf.select(dim, to).copy_(leaf.select(dim, source))


@runtime_checkable
class SizedCache(Protocol):
    """A cache with a known number of positions per row. A request that would overflow it raises before it runs."""

    @property
    def max_len(self) -> int: ...


def length_of(cache: object) -> int | None:
    """The number of positions per row; None if unknown."""
    return cache.max_len if cache is not None and isinstance(cache, SizedCache) else None


def layers_of(keys: Sequence[Tensor]) -> str:
    """A cache's layers for its repr."""
    layer = f"{list(keys[0].shape)} {str(keys[0].dtype).removeprefix('torch.')}" if keys else "[] "
    return f"{len(keys)} layers of {layer}"


class AttentionOptions(TypedDict, total=False):
    """Options of `ops.cached_attention`."""

    value_dim: int | None
    window: int | None
    scale: float | None
    sinks: Tensor | None
    softcap: float | None


def write_and_attend(
    keys: Tensor, values: Tensor, table: Tensor | None, q: Tensor, k: Tensor | None, v: Tensor | None, offsets: Tensor,
    options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """`KVCache.attend` over the tensors of a layer."""
    if k is not None:
        ops.write_cache(keys, k, offsets, table)
    if v is not None:
        ops.write_cache(values, v, offsets, table)
    stored = values if options.get("value_dim") is None else None
    return ops.cached_attention(q, keys, stored, offsets, table=table, **options)


def write_features(rows: Tensor, table: Tensor | None, x: Tensor, offsets: Tensor) -> None:
    """`KVCache.store` to the tensor of a layer."""
    ops.write_cache(rows, x.view(*x.shape[:2], rows.shape[1], -1).transpose(1, 2), offsets, table)


class KVCache(NamedTuple):
    """Keys and values of every layer; a pytree of fixed-shape tensors.

    keys, values: a tensor [B, G, S, D] per layer: B rows, G key/value heads, S = max_len positions, D features or the
        width of another format (`onward.ops.kv_format`).
    states: of the recurrent layers, if any (`onward.cache.plan`), with slot b for row b.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    states: tuple[Tensor, ...] = ()

    @classmethod
    def new(
        cls, *, num_layers: int, batch: int, num_kv_heads: int, max_len: int, head_dim: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVCache":  # fmt: skip
        """An empty cache of equal layers (`of`)."""
        shape = LayerShape(num_kv_heads, head_dim, head_dim)
        return cls.of(CachePlan((shape,) * num_layers, dtype, device), batch, max_len)

    @classmethod
    def of(cls, plan: CachePlan, batch: int, max_len: int) -> "KVCache":
        """An empty cache, with all layers in one buffer. A large one takes memory as it is written.

        Raises:
            RequestError: the system refuses the allocation.
        """
        _, keys, values = plan.new_layers(batch, max_len, by_row=False)
        return cls(keys, values, new_states(plan.states, batch, plan.dtype, plan.device))

    def __repr__(self) -> str:
        return described(self, layers_of(self.keys), in_bytes(self.nbytes))

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
        """Whether a row has the recurrent states after this many positions."""
        return holds(self.states, row, positions)

    def state(self, layer: int) -> RecurrentState:
        """The states of a recurrent layer, counted among the recurrent layers."""
        return of_layer(self.states, layer, None)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, offsets: Tensor,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:  # fmt: skip
        """Store k and v [B, G, T, D] of a layer, then attend with q [B, H, T, D] (`ops.cached_attention`).

        k, v: None if another layer has already stored these keys and values. v is None too with `value_dim`.

        Raises:
            RequestError: as the ops, for example if a gradient is required.
        """
        return write_and_attend(self.keys[layer], self.values[layer], None, q, k, v, offsets, options)

    def store(self, layer: int, x: Tensor, offsets: Tensor) -> None:
        """Store x [B, T, D], the values at a tap, in the keys of a layer."""
        write_features(self.keys[layer], None, x, offsets)


class AdaptedCache(NamedTuple):
    """A cache of rows, of which some have adapters.

    cache: without adapters. slots: int32 [B], the index of each row's adapter; 0 for none (docs/adapters.md).
    """

    cache: Any
    slots: Tensor

    @property
    def leaf_dims(self) -> list[tuple[str, ...] | None]:
        """The names of each tensor's dimensions (`onward.program.NamedDims`)."""
        named = getattr(self.cache, "leaf_dims", None)
        return [*([None] * len(pytree.tree_leaves(self.cache)) if named is None else named), ("rows",)]

    def blank(self) -> "AdaptedCache":
        """An empty cache of the same size with its own memory, without adapters."""
        slots = torch.zeros_like(self.slots)
        if hasattr(self.cache, "leaf_dims"):
            return AdaptedCache(self.cache.blank(), slots)
        return AdaptedCache(pytree.tree_map_only(Tensor, torch.zeros_like, self.cache), slots)
