"""The calls to the system that the store makes, in one object, which tests replace to lose power at any of them."""

import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

_MAX_BUFFERS = 1024  # of one call (IOV_MAX)
_MAX_BYTES = 1 << 30  # Linux writes and reads less than 2 GiB at once


class FileInfo(NamedTuple):
    """A file of a folder. modified: time in ns."""

    name: str
    nbytes: int
    modified: int


class FileSystem:
    """Files of a folder. Everything raises `OSError`."""

    def files(self, folder: str) -> list[FileInfo]:
        """The regular files that belong to this user, and that no other one can write."""
        files = []
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:  # it has just been deleted
                    continue
                if _is_own(info):
                    files.append(FileInfo(entry.name, info.st_size, info.st_mtime_ns))
        return files

    def make_folder(self, folder: str) -> None:
        """Create a folder for its owner only, unless it is there."""
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def names(self, folder: str) -> list[str]:
        """The names of everything in a folder."""
        return os.listdir(folder)

    def changed(self, folder: str) -> int:
        """When a name in the folder last changed, in ns."""
        return os.stat(folder).st_mtime_ns

    def create(self, path: str, nbytes: int) -> int:
        """Open a new file of `nbytes` zeros for writing, readable only by its owner."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NO_FOLLOW, 0o600)
        try:
            os.ftruncate(handle, nbytes)
        except OSError:
            os.close(handle)
            raise
        return handle

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        """Append buffers, without a copy and without the GIL."""
        left = [view for view in buffers if view.nbytes]
        while left:
            left = _rest(left, os.writev(handle, _some(left)))

    def sync(self, handle: int) -> None:
        """Return when the file's content is on the disk."""
        os.fsync(handle)

    def set_modified(self, path: str, modified: int) -> None:
        os.utime(path, ns=(modified, modified), follow_symlinks=False)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, path: str, to: str) -> None:
        os.replace(path, to)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def sync_folder(self, folder: str) -> None:
        """Return when the names in the folder are on the disk."""
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def open(self, path: str) -> int:
        """Open a regular file of this user for reading; nothing else is waited for or followed."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0))
        if not _is_own(os.fstat(handle)):
            os.close(handle)
            raise OSError(f"{path} is not a file of this user")
        return handle

    def read(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers from an offset on, without the GIL. Returns the number of bytes, fewer at the file's end."""
        left, done = [view for view in buffers if view.nbytes], 0
        while left:
            count = os.preadv(handle, _some(left), offset + done)
            if not count:
                break
            done += count
            left = _rest(left, count)
        return done


_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def _is_own(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _some(buffers: list[memoryview]) -> list[memoryview]:
    """The first buffers, as many as one call takes."""
    some: list[memoryview] = []
    left = _MAX_BYTES
    for view in buffers[:_MAX_BUFFERS]:
        some.append(view[:left])
        left -= some[-1].nbytes
        if not left:
            break
    return some


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first `done` bytes."""
    for at, view in enumerate(buffers):
        if done < view.nbytes:
            return [view[done:], *buffers[at + 1 :]]
        done -= view.nbytes
    return []
