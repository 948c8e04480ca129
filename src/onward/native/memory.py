"""Advice to the operating system about large buffers."""

from __future__ import annotations

import ctypes
import mmap
import sys

_HUGE_PAGE = 2 << 20


def advise_huge_pages(address: int, count: int) -> bool:
    """Ask the system to use huge pages (2 MB) for the whole ones among `count` bytes at `address`.

    Call it for weights of many MB, before they are first written: reading them then misses the TLB less.
    Returns whether the system took the advice; results do not depend on it.
    """
    start = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    length = (address + count - start) // _HUGE_PAGE * _HUGE_PAGE
    if length <= 0 or not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(start, length, mmap.MADV_HUGEPAGE) == 0)
