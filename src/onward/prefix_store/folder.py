"""The files of the store in a folder: written whole, bounded in bytes, the least recently used ones deleted first."""

import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from onward.prefix_store.file_system import FileInfo, FileSystem
from onward.prefix_store.segment import is_temporary, key_of, read_header, temporary_name

# How much longer ago each file of a path was used than its parent.
TICK_NS = 1000
_ABANDONED_NS = 600 * 10**9  # a file that is still being written is younger


class Folder:
    """The segments in a folder, of all keys and processes. max_bytes: the most bytes of all of them."""

    def __init__(self, path: str, max_bytes: int, system: FileSystem) -> None:
        self.path, self.max_bytes, self.system = path, max_bytes, system

    def changed(self) -> int:
        """When a name last changed, in ns. Raises `OSError`."""
        return self.system.changed(self.path)

    def names(self) -> list[str]:
        """All names, of other files too. Raises `OSError`."""
        return self.system.names(self.path)

    def files(self) -> list[FileInfo]:
        """The segments, and those that are being written. Raises `OSError`."""
        return [file for file in self.system.files(self.path) if key_of(file.name) or is_temporary(file.name)]

    def write(
        self, name: str, buffers: Sequence[memoryview], modified: int, keep: Collection[str] = ()
    ) -> list[str] | None:
        """Write a file whole, after others were deleted to make room for it. Returns their names, or None if there is
        no room beside those to keep. Raises `OSError`."""
        nbytes = sum(view.nbytes for view in buffers)
        temporary = temporary_name(name, secrets.token_hex(8))
        handle = self.system.create(f"{self.path}/{temporary}", nbytes)
        try:
            try:
                # The new file counts already: of two processes that write at once, the second one sees both.
                removed = self._make_room(keep)
                if removed is not None:
                    self.system.write(handle, buffers)
                    self.system.sync(handle)
            finally:
                self.system.close(handle)
            if removed is None:
                self.remove(temporary)
                return None
            self.system.set_modified(f"{self.path}/{temporary}", modified)
            self.system.rename(f"{self.path}/{temporary}", f"{self.path}/{name}")
        except BaseException:
            self.remove(temporary)
            raise
        return removed

    def _make_room(self, keep: Collection[str]) -> list[str] | None:
        """Delete the least recently used segments over the bound. Returns their names, or None if it is not enough."""
        files = self.files()
        over = sum(file.nbytes for file in files) - self.max_bytes
        abandoned = time.time_ns() - _ABANDONED_NS
        chosen = []
        for file in sorted(files, key=lambda file: (file.modified, file.name)):
            is_idle = file.modified < abandoned if is_temporary(file.name) else over > 0 and file.name not in keep
            if is_idle:
                chosen.append(file.name)
                over -= file.nbytes
        if over > 0:
            return None
        for name in chosen:
            self.remove(name)
        return chosen

    def sync(self) -> None:
        """Return when the names are on the disk. Raises `OSError`."""
        self.system.sync_folder(self.path)

    def remove(self, name: str) -> None:
        """Delete a file, which may be deleted already."""
        with suppress(OSError):
            self.system.remove(f"{self.path}/{name}")

    def touch(self, names: Iterable[str], now: int | None = None) -> None:
        """Make files the last used ones; each is less recent than those before it, so that parents outlive children."""
        modified = time.time_ns() if now is None else now
        for name in dict.fromkeys(names):
            with suppress(OSError):
                self.system.set_modified(f"{self.path}/{name}", modified)
            modified -= TICK_NS


class Contents(NamedTuple):
    """The segments of one key. key: its digest in their names. tokens: of blocks whose first kind is stored. newest,
    oldest: how many seconds ago one was used. A name of "" and 0 tokens: no header could be read."""

    key: str
    model: str
    files: int
    tokens: int
    nbytes: int
    newest: float
    oldest: float


def contents(path: str) -> list[Contents]:
    """The segments in a folder by key, the largest first. Raises `OSError`."""
    system, now = FileSystem(), time.time_ns()
    by_key: dict[str, list[FileInfo]] = {}
    for file in system.files(path):
        if (key := key_of(file.name)) is not None:
            by_key.setdefault(key, []).append(file)
    groups = []
    for key, files in by_key.items():
        segments = [segment for file in files if (segment := read_header(system, path, file.name)) is not None]
        ages = [(now - file.modified) / 1e9 for file in files]
        groups.append(
            Contents(
                key,
                next((segment.model for segment in segments if segment.model), ""),
                len(files),
                sum(segment.ids_of(entry) for segment in segments for entry in segment.entries if entry.kind == 0),
                sum(file.nbytes for file in files),
                min(ages),
                max(ages),
            )
        )
    return sorted(groups, key=lambda group: (-group.nbytes, group.key))


def clear(path: str, older_than: float | None) -> tuple[int, int]:
    """Delete the segments in a folder that were not used for so many seconds, and those that were not finished; all of
    them for None. Returns how many, and their bytes. Raises `OSError`."""
    folder = Folder(path, 0, FileSystem())
    # A segment in use has a time after this, and on a shared disk maybe one ahead of this machine's clock.
    latest = None if older_than is None else time.time_ns() - int(older_than * 1e9)
    chosen = [file for file in folder.files() if latest is None or file.modified <= latest]
    for file in chosen:
        folder.remove(file.name)
    return len(chosen), sum(file.nbytes for file in chosen)
