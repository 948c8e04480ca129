"""The element formats of a KV cache: how the features of a head become a row of stored elements.

A row has all that is needed to read it, its scale too if it has one. So whatever copies, saves or sends cached
positions moves rows as they are; only `write_cache` and `cached_attention` read a row's contents.

Each format has a dtype of its own, by which ops know a cache's format. A new one is a subclass and an entry of
`FORMATS`, after which `onward.load(cache_format=)` takes its name; with a `code` it has kernels.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from onward.errors import OptionError
from onward.ops.kernel_calls import Unsupported


class KVFormat(ABC):
    """name: for messages. dtype: of stored elements. code: the kernels' number for it (native/src/attention/formats.h);
    None: the definitions of the ops run."""

    name: str
    dtype: torch.dtype
    code: int | None = None

    @abstractmethod
    def takes(self, dtype: torch.dtype) -> bool:
        """Whether new keys, values and queries may have this dtype."""

    @abstractmethod
    def width(self, dim: int) -> int:
        """The number of elements of a row for `dim` features."""

    @abstractmethod
    def dim(self, width: int) -> int:
        """The number of features of a row of `width` elements."""

    @abstractmethod
    def store(self, new: Tensor) -> Tensor:
        """Floats [..., D] as rows [..., width(D)]. A row depends on its own features only."""

    @abstractmethod
    def load(self, rows: Tensor) -> Tensor:
        """Rows [..., width(D)] as floats [..., D]."""


class Floats(KVFormat):
    """The features themselves."""

    code = 0

    def __init__(self, dtype: torch.dtype) -> None:
        self.name, self.dtype = str(dtype).removeprefix("torch."), dtype

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype == self.dtype

    def width(self, dim: int) -> int:
        return dim

    def dim(self, width: int) -> int:
        return width

    def store(self, new: Tensor) -> Tensor:
        return new

    def load(self, rows: Tensor) -> Tensor:
        return rows


class Int8(KVFormat):
    """8-bit integers and a scale, the largest magnitude / 127: int8 [D], then the 4 bytes of a float32.

    A row that has an infinite feature or a NaN loads as NaN, one of features below 1e-30 as 0.
    """

    name, dtype, code = "int8", torch.int8, 1

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def width(self, dim: int) -> int:
        return dim + 4

    def dim(self, width: int) -> int:
        return width - 4

    def store(self, new: Tensor) -> Tensor:
        values = new.float()
        largest = values.abs().amax(-1, keepdim=True)
        has_scale = largest.isfinite() & (largest >= 1e-30)
        inverse = torch.full_like(largest, 127) / largest  # 127 / largest would round twice
        integers = torch.where(has_scale, (values * inverse).round(), 0).to(torch.int8)
        scale = torch.where(has_scale, largest / 127, torch.where(largest.isfinite(), 0.0, torch.nan))
        return torch.cat([integers, scale.contiguous().view(torch.int8)], -1)

    def load(self, rows: Tensor) -> Tensor:
        return rows[..., :-4].float() * rows[..., -4:].contiguous().view(torch.float32)


# The format of each dtype of a cache.
FORMATS: dict[torch.dtype, KVFormat] = {
    dtype: Floats(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
} | {torch.int8: Int8()}


def format_of(dtype: torch.dtype) -> KVFormat:
    """The format of a cache of this dtype; by default the numbers themselves."""
    return FORMATS.get(dtype) or Floats(dtype)


def checked_cache_format(name: str | None) -> KVFormat | None:
    """The format of that name; None for floats of the model's dtype.

    Raises:
        OptionError: an unknown name.
    """
    formats = {format.name: format for format in FORMATS.values() if not isinstance(format, Floats)}
    if name is not None and name not in formats:
        raise OptionError("cache_format", f"must be None or one of {', '.join(formats)}; got {name!r}")
    return None if name is None else formats[name]


def kernel_code(dtype: torch.dtype) -> int:
    """The code of the format of this dtype; raises `Unsupported` without kernels."""
    format = format_of(dtype)
    if format.code is None:
        raise Unsupported(f"a cache in {format.name}")
    return format.code
