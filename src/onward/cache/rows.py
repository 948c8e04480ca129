"""Rows in a cache of any class: find the dimension of each tensor that counts them, and copy one row.

A cache of one row and a cache of two show which dimension counts rows, as caches of two lengths show which one counts
positions (`onward.cache.positions`).
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache.positions import position_dims

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
