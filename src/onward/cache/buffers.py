"""Memory that costs nothing until it is written."""

import math
import mmap

import torch
from torch import Tensor

from onward.native import advise_huge_pages

# Below this a fill is cheaper than a map and its page faults.
_WORTH_A_MAP = 4 << 20
# Up to this a buffer may take its memory 2 MB at a time, which fills half a cache of this size in half the time; above
# it, 4 KB at a time, so that a long context costs what is written of it.
_IN_HUGE_PAGES = 128 << 20


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [shape] of which, on the CPU, the system hands out a page when it is first written.

    `torch.zeros` writes all of them: a cache for a long context would take its whole memory for a short text.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < _WORTH_A_MAP or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: after a fork, each process has its own. The tensor keeps the map, and gives it back at its end.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(memory, dtype=dtype)
    if nbytes <= _IN_HUGE_PAGES:
        advise_huge_pages(found.data_ptr(), nbytes)
    return found.view(shape)
