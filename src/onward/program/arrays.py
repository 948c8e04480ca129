"""Memory as a traced forward sees it: storages, and arrays that are views of them."""

import weakref
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Kind(Enum):
    """Where a storage's memory comes from."""

    TOKENS = "tokens"
    OFFSETS = "offsets"
    LOGITS_AT = "logits_at"
    CACHE = "cache"
    PARAM = "param"
    CONSTANT = "constant"  # made by the forward itself, of nothing but numbers
    LOGITS = "logits"
    TEMPORARY = "temporary"  # what ops compute


@dataclass(eq=False)
class Storage:
    """A run of memory.

    index: its place among the trace's storages. nbytes: of the traced shapes. constant: what the forward made.
    param: the tensor among params; whoever calls the program holds it.
    """

    index: int
    kind: Kind
    nbytes: int
    name: str = ""
    constant: Tensor | None = None
    param: "weakref.ref[Tensor] | None" = None

    @property
    def tensor(self) -> Tensor | None:
        """The memory itself, where it is the same in every run: of params and constants."""
        return self.constant if self.param is None else self.param()


@dataclass(frozen=True)
class Array:
    """A strided view of a storage, in elements of its dtype."""

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def byte_offset(self) -> int:
        return self.offset * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after another in order; sizes of 1 may have any stride."""
        wanted = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != wanted:
                return False
            wanted *= size
        return True

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
