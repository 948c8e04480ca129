"""Advice to the operating system about large buffers."""

from __future__ import annotations

import ctypes
import mmap
import sys

_HUGE_PAGE = 2 << 20


def advise_huge_pages(address: int, count: int) -> bool:
    """Asks for huge pages under `count` bytes at `address`, for the whole ones within.

    Worth it for weights of many MB, before they are first written: fewer misses of the page table while
    they stream by. Says whether the system took the advice; nothing else changes either way.
    """
    start = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    length = (address + count - start) // _HUGE_PAGE * _HUGE_PAGE
    if length <= 0 or not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(start, length, mmap.MADV_HUGEPAGE) == 0)
