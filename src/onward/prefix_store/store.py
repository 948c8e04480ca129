"""`PrefixStore`: what is found, read and put. `Writer` does the rest in its thread."""

import os
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from onward.prefix_store.file_system import FileSystem
from onward.prefix_store.folder import Folder
from onward.prefix_store.index import StoredBlock, StoredPart, as_bytes
from onward.prefix_store.segment import Part, read_part
from onward.prefix_store.writer import Put, Writer

_THREADS = 2
_NBYTES_OF_A_THREAD = 16 * 2**20

PartToRead = tuple[StoredPart, Sequence[memoryview]]


class StoreStats(NamedTuple):
    """parts: that can be found. read, written, dropped: bytes by this process; dropped ones were not written.
    queued: bytes that wait to be written. damaged: files with parts that were not read as they were written."""

    parts: int
    read: int
    written: int
    dropped: int
    queued: int
    damaged: int


class PrefixStore:
    """Prefixes in a folder, which several processes share without a server.

    A thread writes, deletes and looks for the files of other processes; `find` is a lookup in memory. Nothing here
    raises for the state of the disk. A folder that cannot be written means one `OnwardWarning`, and nothing is stored
    for some minutes. Files that are damaged, deleted or not the store's are not found. Any thread may call any method.

    Args:
        folder: made if it is absent, readable only by this user.
        key: a digest of everything that the bytes depend on besides root and ids: weights, format, build, ….
            The files of other keys in the same folder are not found, but they count.
        max_bytes: the most bytes of all files of the store in the folder, of all keys and processes. The least recently
            used ones are deleted first.
        model: a readable name for `onward prefix-cache info`.
        block: ids of a block.
        queue_bytes: the most bytes that wait to be written, unless a single `put` has more.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        key: str,
        *,
        max_bytes: int,
        model: str = "",
        block: int = 64,
        queue_bytes: int = 2**31,
        system: FileSystem | None = None,
    ) -> None:
        self.folder, self.key, self.block = os.path.abspath(folder), key, block
        self._system = FileSystem() if system is None else system
        self._writer = Writer(Folder(self.folder, max_bytes, self._system), key, model, block, queue_bytes)
        self._read = 0
        weakref.finalize(self, self._writer.stop).atexit = False

    def find(self, root: str, ids: Sequence[int]) -> list[StoredBlock]:
        """For each full block of the longest stored path that `ids` begins with, the parts that are stored, by kind.

        Every block has a part of kind 0; a path ends before a block without it. The first call may wait until the index
        is made; later ones only look up a dictionary for each block.

        root: where the path starts: the digest of the adapter and the cache salt, or any other text.
        """
        return self._writer.find(root, ids)

    def find_end(self, root: str, ids: Sequence[int]) -> tuple[int, StoredBlock]:
        """How many of the ids the longest stored path begins with, also within a block, and the parts of that block;
        the ids of `find`, and nothing, if there is no further block. A block may have more ids than these."""
        return self._writer.find_end(root, ids)

    def read(self, parts: Sequence[PartToRead]) -> int:
        """Fill flat, writable buffers with the bytes of stored parts, which are verified. Returns how many parts from
        the first on are right; the contents of the other buffers are undefined. Two threads read large parts.

        The blocks and their parents become the last used ones.
        """
        first, *others = _groups(parts)
        discards: dict[str, bool] = {}
        with ThreadPoolExecutor(max(1, len(others))) as pool:  # starts no thread without a task
            results = [pool.submit(self._read_group, group, discards) for group in others]
            counts = [self._read_group(first, discards), *(result.result() for result in results)]
        for name, is_damaged in discards.items():  # now that no thread has yet to open it
            self._writer.discard(name, is_damaged=is_damaged)
        right = 0
        for group, count in zip((first, *others), counts, strict=True):
            right += count
            if count < len(group):
                break
        self._read += sum(part.nbytes for part, _ in parts[:right])
        self._writer.touch(part.file for part, _ in parts[:right])
        return right

    def _read_group(self, parts: Sequence[PartToRead], discards: dict[str, bool]) -> int:
        """Read parts in order. Returns how many are right, up to the first that is not, whose file is added to
        `discards`, with whether it is damaged."""
        name, handle, right = "", -1, 0
        try:
            for part, buffers in parts:
                if part.file != name:
                    if handle >= 0:
                        self._system.close(handle)
                        handle = -1
                    name, handle = part.file, self._system.open(f"{self.folder}/{part.file}")
                if not read_part(self._system, handle, part, buffers):
                    discards[name] = True
                    break
                right += 1
        except OSError:  # most likely it has been deleted
            discards.setdefault(name, False)
        finally:
            if handle >= 0:
                self._system.close(handle)
        return right

    def put(self, root: str, ids: Sequence[int], parts: Iterable[Part]) -> bool:
        """Queue parts of the blocks of a path to be written, and return at once. The last block may have fewer ids; it
        is deleted when more of it is stored.

        Parts that are stored already are skipped, and so are those of blocks whose parent is neither stored nor among
        them, since nobody could find them. The stored blocks of the path become the last used ones.

        parts: in the order of their blocks; kind 0 of a block comes first. The store keeps the buffers, which must not
        change. Returns False if they are dropped: the queue is full, or nothing is stored.
        """
        return self._writer.put(Put(root, as_bytes(ids), tuple(parts)))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that was put is on the disk, and what other processes have written is found. Returns
        whether that took at most `timeout` seconds."""
        return self._writer.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Write what is queued, for at most `timeout` seconds, and end the thread. Nothing is found afterwards."""
        self._writer.close(timeout)

    def stats(self) -> StoreStats:
        writer = self._writer
        return StoreStats(writer.index.count, self._read, writer.written, writer.dropped, writer.queued, writer.damaged)


def _groups(parts: Sequence[PartToRead]) -> list[list[PartToRead]]:
    """Consecutive parts for each thread."""
    share = max(_NBYTES_OF_A_THREAD, -(-sum(part.nbytes for part, _ in parts) // _THREADS))
    groups: list[list[PartToRead]] = [[]]
    nbytes = 0
    for each in parts:
        if nbytes >= share:
            groups.append([])
            nbytes = 0
        groups[-1].append(each)
        nbytes += each[0].nbytes
    return groups
