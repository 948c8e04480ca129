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
    return _advise(address, count, _HUGE_PAGE, getattr(mmap, "MADV_HUGEPAGE", None))


def give_back_pages(address: int, count: int) -> bool:
    """Let the system take the whole pages among `count` bytes at `address`: they hold zeros when they are next read.

    Only for private maps of no file. Returns whether the system took any; where it cannot the bytes stay as they are.
    """
    return _advise(address, count, mmap.PAGESIZE, getattr(mmap, "MADV_DONTNEED", None))


def _advise(address: int, count: int, page: int, advice: int | None) -> bool:
    """Advise the system about the whole pages, of this size, among `count` bytes at `address`."""
    start = -(-address // page) * page
    length = (address + count - start) // page * page
    # Elsewhere the advices of the same names do other things.
    if length <= 0 or not sys.platform.startswith("linux") or advice is None:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(start, length, advice) == 0)
