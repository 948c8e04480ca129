"""Zeros that take no memory until they are written."""

import math
import mmap

import torch
from torch import Tensor

from onward.native import advise_huge_pages

# Bytes. Filling a smaller buffer is cheaper than mapping it and faulting its pages in.
_SMALLEST_MAP = 4 << 20
# Bytes. A buffer up to this size may take its memory 2 MB at a time, which halves the time to fill half of it. A larger
# one takes 4 KB at a time, so that a long context takes no more memory than is written.
_LARGEST_IN_HUGE_PAGES = 128 << 20


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of `shape`. On the CPU the system provides each page when it is first written.

    `torch.zeros` writes all of them: a cache for a long context would take all its memory, even for a short text.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < _SMALLEST_MAP or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: after a fork each process has its own copy. The tensor keeps the map alive and frees it with itself.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(memory, dtype=dtype)
    if nbytes <= _LARGEST_IN_HUGE_PAGES:
        advise_huge_pages(buffer.data_ptr(), nbytes)
    return buffer.view(shape)
