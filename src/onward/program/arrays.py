"""Memory as a traced forward sees it: storages, and arrays that are views of them."""

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

    index: its place among the trace's storages. nbytes: of the traced shapes. tensor: the memory itself where it
    exists before the program runs (params, constants, the cache compiled with).
    """

    index: int
    kind: Kind
    nbytes: int
    tensor: Tensor | None = None
    name: str = ""


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
