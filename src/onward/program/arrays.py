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
    CONSTANT = "constant"  # tensors that the forward makes of numbers alone
    LOGITS = "logits"
    TEMPORARY = "temporary"  # results of operators


@dataclass(eq=False)
class Storage:
    """A run of memory.

    index: its place among the trace's storages. nbytes: its size for the traced shapes. constant: the tensor, for a
    constant. param: the tensor among params; the program's caller holds it. layout: its shape, strides and dtype.
    """

    index: int
    kind: Kind
    nbytes: int
    name: str = ""
    constant: Tensor | None = None
    param: "weakref.ref[Tensor] | None" = None
    layout: tuple[object, ...] = ()

    def refer_to(self, param: Tensor) -> None:
        """Make it the memory of a param, without keeping the param alive."""
        self.param = weakref.ref(param)
        self.layout = param.shape, param.stride(), param.dtype

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that holds the memory, for params and constants: they are the same in every run."""
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
        """Whether its elements lie one after another in order. The stride of a dimension of size 1 does not count."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
