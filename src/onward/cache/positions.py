"""Positions in a cache of any class: find the dimension of each tensor that counts them, and copy the first ones.

A cache is a pytree of tensors, and its number of positions decides their sizes. So two caches of different lengths
show which dimension counts positions.
"""

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def position_dims(cache: Any, length: int, other: Any, other_length: int) -> list[int | None] | None:
    """For each leaf of `cache` the dimension that counts its `length` positions; None for a leaf that has none.

    `onward.cache.rows` finds the dimension of rows with it, from caches of two batches.

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
