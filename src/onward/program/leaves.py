"""The tensors of a cache: recognise them at the next step, and tell their shapes for other numbers of rows."""

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import ProgramError

# Names of dimensions, from `NamedDims`.
_ROWS, _BLOCKS = "rows", "blocks"
# The number of blocks in every signature: any, but of one the stride would mean nothing.
_SOME_BLOCKS = 2
# How many caches are known: an engine has one for each number of rows that it runs.
_MOST_KNOWN = 32


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


class Layout(NamedTuple):
    """How a tensor lies in memory. shape: None for the number of rows. strides: None if contiguous."""

    shape: tuple[int | None, ...]
    strides: tuple[int, ...] | None
    dtype: torch.dtype


# The layout of each tensor of a cache; other leaves as they are.
CacheSignature = tuple[Hashable, ...]


class CacheLeaves:
    """The tensors of a cache, held weakly: a program must not keep the memory of a request that is over.

    signature: the shapes, strides and dtypes of all leaves.
    """

    def __init__(self, cache: Any) -> None:
        leaves = tensors_of(cache)
        self._dims = tuple(cache.leaf_dims) if isinstance(cache, NamedDims) else None
        self.signature: CacheSignature
        if self._dims is None:
            self.signature = tuple(map(_layout, pytree.tree_leaves(cache)))
        else:
            self.signature = tuple(map(_named_layout, leaves, self._dims))
        self._freed: list[object] = []
        self._references = [weakref.ref(leaf, self._freed.append) for leaf in leaves]

    @property
    def live(self) -> bool:
        """Whether no tensor has been freed. When one has, a new one may get its id."""
        return not self._freed

    def for_any_rows(self, batch: int) -> CacheSignature:
        """The signature with the number of rows, `batch`, left open.

        Raises:
            ProgramError: the cache says that it has another number of rows.
        """
        if self._dims is None:
            # Of one row a size of 1 says nothing.
            return for_any_rows(self.signature, batch) if batch > 1 else self.signature
        return tuple(map(partial(_with_rows_open, batch), self.signature, self._dims))

    def tensors(self) -> list[Tensor]:
        leaves = [reference() for reference in self._references]
        assert all(leaf is not None for leaf in leaves), "the cache of a program has been freed"
        return leaves  # type: ignore[return-value]


class LeafCache:
    """The `CacheLeaves` of the last caches. A step over tensors that were seen before costs a look-up of their ids."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, CacheLeaves] = OrderedDict()

    def of(self, cache: Any) -> CacheLeaves:
        key = _identity(cache)
        leaves = self._known.get(key)
        if leaves is None or not leaves.live:
            leaves = self._known[key] = CacheLeaves(cache)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return leaves


def _identity(cache: Any) -> Hashable:
    """The tensors of a cache by id, its other leaves as they are."""
    tensors = _plain_tensors(cache)
    if tensors is not None:
        return tuple(map(id, tensors))
    return tuple(id(leaf) if isinstance(leaf, Tensor) else (type(leaf), _setting(leaf)) for leaf in leaves_of(cache))


def tensors_of(cache: Any) -> list[Tensor]:
    """The tensors among the leaves of a cache, in order."""
    tensors = _plain_tensors(cache)
    return [leaf for leaf in leaves_of(cache) if isinstance(leaf, Tensor)] if tensors is None else tensors


def _plain_tensors(cache: Any) -> list[Tensor] | None:
    """The leaves of a tuple of tuples and tensors, as `KVCache` is; None for another pytree.

    A walk takes 30 times as long, at every step.
    """
    if not isinstance(cache, tuple):
        return None
    leaves = list(chain.from_iterable(part if type(part) is tuple else (part,) for part in cache))
    return leaves if set(map(type, leaves)) == {Tensor} else None


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a pytree, in order. (pytree's own walk takes ten times as long, of a large model 2 ms.)"""
    if tree is None or isinstance(tree, Tensor | int | float | str):
        return [tree]
    if isinstance(tree, tuple | list):
        return [leaf for item in tree for leaf in leaves_of(item)]
    if type(tree) is dict:
        return [leaf for item in tree.values() for leaf in leaves_of(item)]
    return pytree.tree_leaves(tree)


def for_any_rows(signature: CacheSignature, batch: int) -> CacheSignature:
    """The signature of a cache with the number of rows left open. The given one has `batch` rows, 2 or more.

    The first size that equals `batch` is taken for the number of rows. Where that is wrong, the result fits no cache of
    another number of rows.
    """
    return tuple(_for_any_rows(leaf, batch) if isinstance(leaf, Layout) else leaf for leaf in signature)


def _for_any_rows(leaf: Layout, batch: int) -> Layout:
    if batch not in leaf.shape:
        return leaf
    rows = leaf.shape.index(batch)
    return leaf._replace(shape=(*leaf.shape[:rows], None, *leaf.shape[rows + 1 :]))


def _with_rows_open(batch: int, layout: Layout, dims: tuple[str, ...]) -> Layout:
    rows = {size for size, dim in zip(layout.shape, dims, strict=True) if dim == _ROWS}
    if rows - {batch}:
        raise ProgramError(f"a program of {batch} rows got a cache of {', '.join(map(str, rows))}: make one of as many")
    return layout._replace(
        shape=tuple(None if dim == _ROWS else size for size, dim in zip(layout.shape, dims, strict=True))
    )


def without_memory(cache: Any, signature: CacheSignature, batch: int) -> Any:
    """A cache of this structure with `batch` rows, on the meta device. signature: for any number of rows."""
    leaves, spec = pytree.tree_flatten(cache)
    return pytree.tree_unflatten(
        [
            _meta_tensor(layout, batch) if isinstance(layout, Layout) else leaf
            for leaf, layout in zip(leaves, signature, strict=True)
        ],
        spec,
    )


def _meta_tensor(layout: Layout, batch: int) -> Tensor:
    shape = [batch if size is None else size for size in layout.shape]
    if layout.strides is None:
        return torch.empty(shape, dtype=layout.dtype, device="meta")
    return torch.empty_strided(shape, layout.strides, dtype=layout.dtype, device="meta")


def _named_layout(leaf: Tensor, dims: tuple[str, ...]) -> Layout:
    """The layout of a tensor whose dimensions are named; of shared memory only the strides count."""
    shape = tuple(_SOME_BLOCKS if dim == _BLOCKS else size for size, dim in zip(leaf.shape, dims, strict=True))
    # Of one row no stride counts, of one block it does.
    strides = None if _BLOCKS not in dims and leaf.is_contiguous() else tuple(leaf.stride())
    return Layout(shape, strides, leaf.dtype)


def _layout(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        strides = None if leaf.is_contiguous() else tuple(leaf.stride())
        return Layout(tuple(leaf.shape), strides, leaf.dtype)
    return _setting(leaf)


def _setting(leaf: Any) -> Hashable:
    """A leaf that is no tensor, as part of a key."""
    return leaf if isinstance(leaf, Hashable) else str(type(leaf))
