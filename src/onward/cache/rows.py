"""Any cache's rows, without knowing its class: which dimension of its tensors counts them, and copying one.

As caches of two lengths show where the positions are (`onward.cache.positions`), caches of one row and of two show
where the rows are.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache.positions import position_dims

# Any number of positions will do to see the rows.
_POSITIONS = 8


def row_dims(new_cache: Callable[[int, int], Any]) -> list[int] | None:
    """For each leaf of a cache of this kind the dimension that counts its rows.

    Args:
        new_cache: (batch, max_len) -> an empty cache.

    Returns:
        None where a leaf is no tensor, or does not grow with the batch in one dimension, from 1 to 2.
    """
    dims = position_dims(new_cache(1, _POSITIONS), 1, new_cache(2, _POSITIONS), 2)
    known = [dim for dim in dims or () if dim is not None]
    return None if dims is None or len(known) < len(dims) else known


def have_rows(cache: Any, dims: Sequence[int], batch: int) -> bool:
    """Whether each leaf of `cache` is a tensor of `batch` rows in the dimension that `row_dims` says."""
    leaves = pytree.tree_leaves(cache)
    return len(leaves) == len(dims) and all(
        isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == batch
        for leaf, dim in zip(leaves, dims, strict=True)
    )


def copy_row(cache: Any, dims: Sequence[int], source: int, to: int) -> None:
    """Have row `to` hold all that row `source` holds."""
    for leaf, dim in zip(pytree.tree_leaves(cache), dims, strict=True):
        leaf.select(dim, to).copy_(leaf.select(dim, source))
