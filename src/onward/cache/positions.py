"""Positions in a cache of any class: find the dimension of each tensor that counts them, and copy the first ones.

A cache is a pytree of tensors, and its number of positions decides their sizes. So two caches of different lengths
show which dimension counts positions.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils import _pytree as pytree


def position_dims(cache: Any, length: int, other: Any, other_length: int) -> list[int | None] | None:
    """For each leaf of `cache` the dimension that counts its `length` positions; None for a leaf that has none.

    `onward.cache.positions` finds the dimension of rows with it, from caches of two batches.

    Args:
        other: a cache of the same model and batch, of another length.

    Returns:
        None where a leaf is no tensor, or where the two caches differ in more than their number of positions.
    """
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
    """The first `count` positions of a cache's tensor, over the same memory; the whole tensor if `dim` is None."""
    return leaf if dim is None else leaf.narrow(dim, 0, count)


def copy_positions(cache: Any, to: Any, dims: list[int | None], count: int) -> None:
    """Copy the first `count` positions of `cache` to `to`, a cache of the same model. dims: from `position_dims`."""
    for source, target, dim in zip(pytree.tree_leaves(cache), pytree.tree_leaves(to), dims, strict=True):
        first_positions(target, dim, count).copy_(first_positions(source, dim, count))


# The number of positions of the two caches; any will do.
_POSITIONS = 8


def row_dims(new_cache: Callable[[int, int], Any]) -> list[int] | None:
    """For each leaf of the caches that `new_cache` makes, the dimension that counts rows.

    Args:
        new_cache: (batch, max_len) -> an empty cache.

    Returns:
        None where a leaf is no tensor, or has no single dimension that grows with the batch.
    """
    dims = position_dims(new_cache(1, _POSITIONS), 1, new_cache(2, _POSITIONS), 2)
    batch_dims = [dim for dim in dims or () if dim is not None]
    return None if dims is None or len(batch_dims) < len(dims) else batch_dims


def have_rows(cache: Any, dims: Sequence[int], batch: int) -> bool:
    """Whether each leaf of `cache` is a tensor with `batch` rows in the dimension that `row_dims` gave."""
    leaves = pytree.tree_leaves(cache)
    return len(leaves) == len(dims) and all(
        isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == batch
        for leaf, dim in zip(leaves, dims, strict=True)
    )


def copy_row(cache: Any, dims: Sequence[int], source: int, to: int) -> None:
    """Copy all of row `source` to row `to`."""
    for leaf, dim in zip(pytree.tree_leaves(cache), dims, strict=True):
        leaf.select(dim, to).copy_(leaf.select(dim, source))


@runtime_checkable
class SizedCache(Protocol):
    """A cache that knows how many positions a row holds. A request that would overflow it raises before it runs."""

    @property
    def max_len(self) -> int: ...


@runtime_checkable
class NamedDims(Protocol):
    """A cache that says what the dimensions of its tensors count, so that a program need not guess.

    leaf_dims: for each leaf the names of its dimensions. "rows" counts the rows of a call. "blocks" counts memory that
    rows share: its number makes no difference to a program. Sizes of any other name belong to a program's shape.
    """

    @property
    def leaf_dims(self) -> Sequence[tuple[str, ...]]: ...

    def blank(self) -> Any:
        """An empty cache of as many rows and positions, over memory of its own."""
        ...


def length_of(cache: object) -> int | None:
    """How many positions a row of the cache holds; None where the cache does not say."""
    return cache.max_len if cache is not None and isinstance(cache, SizedCache) else None
