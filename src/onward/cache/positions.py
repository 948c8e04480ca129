"""Any cache's positions, without knowing its class: which dimension of its tensors counts them, and copying the first.

A cache is a pytree of tensors whose size is settled by how many positions it has. So two caches of different
lengths show where the positions are.
"""

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def position_dims(cache: Any, length: int, other: Any, other_length: int) -> list[int | None] | None:
    """For each leaf of `cache`, of `length` positions, the dimension that counts them; None for a leaf without.

    `onward.cache.rows` finds rows with it, between caches of two batches.

    Args:
        other: a cache of the same model and batch, of another length.

    Returns:
        None where a leaf is no tensor, or differs between the two caches in another way than its number of positions.
    """
    leaves, structure = pytree.tree_flatten(cache)
    others, other_structure = pytree.tree_flatten(other)
    if structure != other_structure or length == other_length:
        return None
    dims: list[int | None] = []
    for one, two in zip(leaves, others, strict=True):
        if not isinstance(one, Tensor) or not isinstance(two, Tensor) or one.dtype != two.dtype:
            return None
        if one.shape == two.shape:
            dims.append(None)
            continue
        if one.dim() != two.dim():
            return None
        differing = [dim for dim in range(one.dim()) if one.shape[dim] != two.shape[dim]]
        if len(differing) != 1 or (one.shape[differing[0]], two.shape[differing[0]]) != (length, other_length):
            return None
        dims.append(differing[0])
    return dims


def first_positions(leaf: Tensor, dim: int | None, count: int) -> Tensor:
    """The first `count` positions of a cache's tensor, over the same memory; all of one that has none."""
    return leaf if dim is None else leaf.narrow(dim, 0, count)


def copy_positions(cache: Any, to: Any, dims: list[int | None], count: int) -> None:
    """Have `to` hold the first `count` positions of `cache`, a cache of the same model; `dims` of `position_dims`."""
    for source, target, dim in zip(pytree.tree_leaves(cache), pytree.tree_leaves(to), dims, strict=True):
        first_positions(target, dim, count).copy_(first_positions(source, dim, count))
