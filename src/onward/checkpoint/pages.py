"""Release the pages of a mapped file that have been read for the last time."""

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from onward.checkpoint.shards import weight_files

_MADV_DONTNEED = 4


def page_releaser(folder: Path) -> Callable[[], None]:
    """`releaser_of` of the folder's safetensors files."""
    return releaser_of(folder / file for file in weight_files(folder))


def releaser_of(files: Iterable[Path]) -> Callable[[], None]:
    """A function that drops this process's resident pages of these files, as far as they are mapped when it is called.

    Nothing is lost: the maps are never written, so a page that is needed again is read from the file again. Without
    it memory would hold the mapped file and its packed copy at once. It does nothing on systems other than Linux.
    """
    if sys.platform != "linux":
        return lambda: None
    libc = ctypes.CDLL(None)
    names = {os.fsencode(file.resolve()) for file in files}

    def release() -> None:
        for start, length in _mapped_ranges(names):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED)

    return release


def _mapped_ranges(names: Collection[bytes]) -> list[tuple[int, int]]:
    """(address, bytes) of each map of the files of these names, from /proc/self/maps."""
    ranges, endings = [], tuple(names)
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        if line.endswith(endings) and line.split(maxsplit=5)[-1] in names:
            start, end = (int(address, 16) for address in line.split(maxsplit=1)[0].split(b"-"))
            ranges.append((start, end - start))
    return ranges
