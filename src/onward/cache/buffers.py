"""Zeros that take no memory until they are written."""

import math
import mmap
import platform
import sys

import torch
from torch import Tensor

from onward.errors import RequestError, one_line
from onward.native import advise_huge_pages
from onward.reprs import in_bytes

# Bytes. Filling a smaller buffer is cheaper than mapping it and faulting its pages in.
_SMALLEST_MAP = 4 << 20
# Bytes. A buffer up to this size may take its memory 2 MB at a time, which halves the time to fill half of it. A larger
# one takes 4 KB at a time, so that a long context takes no more memory than is written.
_LARGEST_IN_HUGE_PAGES = 128 << 20


# Let a map be larger than the memory that is free now (Python names it from 3.13 on; the value of these processors).
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64") else 0


def lazy_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, huge_pages: bool | None = None
) -> Tensor:
    """Zeros of `shape`. On the CPU the system provides each page when it is first written (see `is_lazy`).

    `torch.zeros` writes all of them: a cache for a long context would take all its memory, even for a short text.

    Args:
        huge_pages: whether memory may come 2 MB at a time; by default a small buffer's does.

    Raises:
        RequestError: the system refuses so much.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if not is_lazy(nbytes, device):
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: after a fork each process has its own copy. The tensor keeps the map alive and frees it with itself.
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise RequestError(
            f"the system gives no {in_bytes(nbytes)} for a cache ({one_line(error)}): ask for fewer rows or positions"
        ) from error
    buffer = torch.frombuffer(memory, dtype=dtype)
    if nbytes <= _LARGEST_IN_HUGE_PAGES if huge_pages is None else huge_pages:
        advise_huge_pages(buffer.data_ptr(), nbytes)
    return buffer.view(shape)


def is_lazy(nbytes: int, device: torch.device) -> bool:
    """Whether `lazy_zeros` of so many bytes is a map of its own, of which pages can be given back."""
    return device.type == "cpu" and nbytes >= _SMALLEST_MAP and hasattr(mmap, "MAP_PRIVATE")
