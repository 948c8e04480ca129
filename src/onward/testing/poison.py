"""Fill a cache with values that show in the logits if a model reads them."""

from torch import Tensor
from torch.utils import _pytree as pytree

from onward.models import Cache

EMPTY = -1


def poison(cache: Cache) -> Cache:
    """Fill every tensor of a cache in place with NaN (-1 where it holds whole numbers), and return the cache.

    The logits of a model that reads an entry at or past a row's offset become NaN. A model that keeps the contract
    decodes over a poisoned cache as over a new one.
    """
    for leaf in pytree.tree_leaves(cache):
        if isinstance(leaf, Tensor):
            leaf.fill_(float("nan") if leaf.is_floating_point() else EMPTY)
    return cache
