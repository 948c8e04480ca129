"""The tensors of a cache: identify them at the next step, and derive their shapes for other numbers of rows."""

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import ProgramError

# Names of dimensions, from `NamedDims`.
_ROWS, _BLOCKS = "rows", "blocks"
# The number of blocks in every signature. Any number works except 1, for which the stride is arbitrary.
_SIGNATURE_BLOCKS = 2
# The maximum number of cached `CacheLeaves`. An engine has one cache for each number of rows that it runs.
_MAX_CACHES = 32


@runtime_checkable
class NamedDims(Protocol):
    """A cache that names the dimensions of its tensors, so that a program doesn't have to guess them.

    leaf_dims: the names of each leaf's dimensions; None for a leaf without names. "rows" is the number of rows of a
    call. "blocks" is the size of memory that rows share, which is not part of a program's shape. Sizes of any other
    name are.
    """

    @property
    def leaf_dims(self) -> Sequence[tuple[str, ...] | None]: ...

    def blank(self) -> Any:
        """An empty cache with the same number of rows and positions, over its own memory."""
        ...


class Layout(NamedTuple):
    """The memory layout of a tensor. shape: None for the number of rows. strides: None if contiguous."""

    shape: tuple[int | None, ...]
    strides: tuple[int, ...] | None
    dtype: torch.dtype


# The layout of each tensor of a cache; other leaves as they are.
CacheSignature = tuple[Hashable, ...]


class CacheLeaves:
    """Weak references to the tensors of a cache: a program must not keep the memory of a finished request alive.

    signature: the shapes, strides and dtypes of all leaves.
    """

    def __init__(self, cache: Any) -> None:
        leaves, every = tensors_of(cache), pytree.tree_leaves(cache)
        self._dims = cache.leaf_dims if isinstance(cache, NamedDims) else [None] * len(every)
        self.signature: CacheSignature = tuple(map(_layout, every, self._dims))
        self._freed: list[object] = []
        self._references = [weakref.ref(leaf, self._freed.append) for leaf in leaves]

    @property
    def live(self) -> bool:
        """Whether no tensor has been freed. A new tensor may reuse the id of a freed one."""
        return not self._freed

    def for_any_rows(self, batch: int) -> CacheSignature:
        """The signature with the number of rows, `batch`, replaced by None.

        Without named dims the first size that equals `batch` counts as the number of rows. If that is wrong, the result
        matches no cache with another number of rows.

        Raises:
            ProgramError: the cache has another number of rows.
        """
        return tuple(map(partial(_for_any_rows, batch), self.signature, self._dims))

    def tensors(self) -> list[Tensor]:
        leaves = [reference() for reference in self._references]
        assert all(leaf is not None for leaf in leaves), "the cache of a program has been freed"
        return leaves  # type: ignore[return-value]


class LeafCache:
    """The `CacheLeaves` of recent caches. For a known cache a step only looks up the ids of its tensors."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, CacheLeaves] = OrderedDict()

    def of(self, cache: Any) -> CacheLeaves:
        key = _identity(cache)
        leaves = self._entries.get(key)
        if leaves is None or not leaves.live:
            leaves = self._entries[key] = CacheLeaves(cache)
            if len(self._entries) > _MAX_CACHES:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        return leaves


def _identity(cache: Any) -> Hashable:
    """The ids of a cache's tensors, and its other leaves as they are."""
    tensors = _plain_tensors(cache)
    if tensors is not None:
        return tuple(map(id, tensors))
    return tuple(id(leaf) if isinstance(leaf, Tensor) else (type(leaf), _hashable(leaf)) for leaf in leaves_of(cache))


def tensors_of(cache: Any) -> list[Tensor]:
    """The tensors among the leaves of a cache, in order."""
    tensors = _plain_tensors(cache)
    return [leaf for leaf in leaves_of(cache) if isinstance(leaf, Tensor)] if tensors is None else tensors


def _plain_tensors(cache: Any) -> list[Tensor] | None:
    """The leaves of a tuple of tuples and tensors, such as `KVCache`; None for another pytree.

    A general walk takes 30 times as long, at every step.
    """
    if not isinstance(cache, tuple):
        return None
    leaves: list[Any] = []
    for part in cache:
        leaves += part if type(part) is tuple else (part,)
    return leaves if set(map(type, leaves)) == {Tensor} else None


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a pytree, in order. (pytree's walk takes ten times as long, 2 ms for a large model.)"""
    if tree is None or isinstance(tree, Tensor | int | float | str):
        return [tree]
    if isinstance(tree, tuple | list):
        return [leaf for item in tree for leaf in leaves_of(item)]
    if type(tree) is dict:
        return [leaf for item in tree.values() for leaf in leaves_of(item)]
    return pytree.tree_leaves(tree)


def _for_any_rows(batch: int, leaf: Hashable, dims: tuple[str, ...] | None) -> Hashable:
    if not isinstance(leaf, Layout):
        return leaf
    if dims is None:  # a size of 1 is ambiguous
        rows = [leaf.shape.index(batch)] if batch > 1 and batch in leaf.shape else []
    else:
        rows = [at for at, dim in enumerate(dims) if dim == _ROWS]
    if others := {leaf.shape[at] for at in rows} - {batch}:
        sizes = ", ".join(map(str, others))
        raise ProgramError(f"a program of {batch} rows got a cache of {sizes}: use one of {batch}")
    return leaf._replace(shape=tuple(None if at in rows else size for at, size in enumerate(leaf.shape)))


def without_memory(cache: Any, signature: CacheSignature, batch: int) -> Any:
    """A cache with this structure and `batch` rows on the meta device. signature: of `for_any_rows`."""
    leaves, spec = pytree.tree_flatten(cache)
    pairs = zip(leaves, signature, strict=True)
    metas = [_meta_tensor(layout, batch) if isinstance(layout, Layout) else leaf for leaf, layout in pairs]
    return pytree.tree_unflatten(metas, spec)


def _meta_tensor(layout: Layout, batch: int) -> Tensor:
    shape = [batch if size is None else size for size in layout.shape]
    if layout.strides is None:
        return torch.empty(shape, dtype=layout.dtype, device="meta")
    return torch.empty_strided(shape, layout.strides, dtype=layout.dtype, device="meta")


def _layout(leaf: Any, dims: tuple[str, ...] | None) -> Hashable:
    """The layout of a leaf. Memory that rows share counts by its strides only."""
    if not isinstance(leaf, Tensor):
        return _hashable(leaf)
    names = [""] * leaf.dim() if dims is None else dims
    shape = tuple(_SIGNATURE_BLOCKS if dim == _BLOCKS else size for size, dim in zip(leaf.shape, names, strict=True))
    # The stride of a single row is irrelevant; the stride of a single block is not.
    strides = None if _BLOCKS not in names and leaf.is_contiguous() else tuple(leaf.stride())
    return Layout(shape, strides, leaf.dtype)


def _hashable(leaf: Any) -> Hashable:
    """A leaf that isn't a tensor, as part of a key."""
    return leaf if isinstance(leaf, Hashable) else str(type(leaf))
