"""The thread of a `PrefixStore`: it writes and deletes files, and keeps the index like the folder."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from onward.errors import OnwardWarning, warn
from onward.prefix_store.folder import TICK_NS, Folder
from onward.prefix_store.index import Index, StoredBlock
from onward.prefix_store.segment import Part, encode, key_digest, key_of, read_header
from onward.util.process import lower_priority, renew_in_forks

# The most bytes of a file, unless one part has more: files are deleted whole.
SEGMENT_NBYTES = 64 * 2**20
_REFRESH_SECONDS = 2.0
_RETRY_SECONDS = 300.0
# A folder whose time of change is this recent may change again without another time.
_SAME_TIME_NS = 10**9


class Put(NamedTuple):
    """Parts of a path to be written."""

    root: str
    ids: bytes
    parts: Sequence[Part]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Writer:
    """Everything that changes the files of one key, or the index of them.

    index: of the files, once the folder has been read. written, dropped, queued: bytes. damaged: files.
    """

    def __init__(self, folder: Folder, key: str, model: str, block: int, queue_nbytes: int) -> None:
        self._folder, self._key, self._model, self._block = folder, key, model, block
        self._queue_nbytes, self._digest = queue_nbytes, key_digest(key)
        self.written = self.dropped = self.damaged = 0
        self._warned = self._closed = False
        self._retry_at = 0.0
        try:
            folder.system.make_folder(folder.path)
        except OSError as error:
            self._fail(error)
        self._begin()
        with self._changed:
            self._wake()
        renew_in_forks(self)

    def _begin(self) -> None:
        self.index, self._opened, self.queued = Index(self._block), threading.Event(), 0
        self._changed = threading.Condition()
        self._queue: deque[Put] = deque()
        self._touched: dict[str, None] = {}
        self._discarded: dict[str, bool] = {}
        self._is_busy, self._must_look = False, True
        self._seen = -1
        self._thread: threading.Thread | None = None

    def renew(self) -> None:
        """In a forked child: begin again, with an empty queue. The thread starts when the store is used."""
        if not self._closed:
            self._begin()

    # ── any thread ──

    def find(self, root: str, ids: Sequence[int]) -> list[StoredBlock]:
        self._wait_for_index()
        return self.index.find(root, ids)

    def find_end(self, root: str, ids: Sequence[int]) -> tuple[int, StoredBlock]:
        self._wait_for_index()
        return self.index.find_end(root, ids)

    def _wait_for_index(self) -> None:
        if not self._opened.is_set():
            with self._changed:
                self._wake()
            self._opened.wait()

    def put(self, put: Put) -> bool:
        """Queue parts. Returns False if they are dropped."""
        nbytes = put.nbytes
        with self._changed:
            is_full = self.queued > 0 and self.queued + nbytes > self._queue_nbytes
            if self._closed or is_full or time.monotonic() < self._retry_at:
                self.dropped += nbytes
                return False
            self._queue.append(put)
            self.queued += nbytes
            self._wake()
        return True

    def touch(self, files: Iterable[str]) -> None:
        """Make files the last used ones, in the order of a path."""
        with self._changed:
            self._touched.update(dict.fromkeys(files))
            self._wake()

    def discard(self, file: str, *, is_damaged: bool) -> None:
        """Remove a file from the index, and from the disk if it is damaged."""
        with self._changed:
            self._discarded[file] = is_damaged
            self._wake()

    def flush(self, timeout: float | None) -> bool:
        with self._changed:
            self._must_look = not self._closed
            self._wake()
            self._changed.wait_for(lambda: self._is_idle or self._thread is None, timeout)
            return self._is_idle

    def stop(self) -> None:
        """Let the thread end once everything is written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self, timeout: float | None) -> None:
        self.flush(timeout)
        self.stop()
        with self._changed:
            nbytes = sum(put.nbytes for put in self._queue)
            self.dropped, self.queued = self.dropped + nbytes, self.queued - nbytes
            self._queue.clear()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        self.index = Index(self._block)
        self._opened.set()

    @property
    def _is_idle(self) -> bool:
        return not (self._has_work or self._is_busy)

    @property
    def _has_work(self) -> bool:
        return bool(self._queue or self._touched or self._discarded or self._must_look)

    def _wake(self) -> None:
        """Start or wake the thread."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="onward-prefix-store", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # ── the thread ──

    def _run(self) -> None:
        lower_priority()
        thread = self._thread
        try:
            while self._wait():
                self._work()
        finally:
            with self._changed:
                if self._thread is thread:
                    self._thread, self._is_busy = None, False
                self._opened.set()
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for work, or until it is time to look at the folder. Returns False at the end."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            if not self._has_work and not self._closed:
                is_awake = self._changed.wait_for(lambda: self._has_work or self._closed, _REFRESH_SECONDS)
                self._must_look = self._must_look or not is_awake
            self._is_busy = True
            return self._has_work

    def _work(self) -> None:
        with self._changed:
            touched, self._touched = list(self._touched), {}
            discarded, self._discarded = self._discarded, {}
            self._must_look = False
            put = self._queue.popleft() if self._queue else None
        for file, is_damaged in discarded.items():
            self.index.remove(file)
            if is_damaged:
                self.damaged += 1
                self._folder.remove(file)
        self._look()
        self._opened.set()
        # Also their parents, which may not have been read because they are in memory.
        self._folder.touch(chain.from_iterable(map(self.index.path_of, touched)))
        if put is not None:
            try:
                self._write(put)
            finally:
                with self._changed:
                    self.queued -= put.nbytes

    def _look(self) -> None:
        """Add the files of other processes to the index, and remove those that are deleted."""
        try:
            changed = self._folder.changed()
            if changed == self._seen:
                return
            names = {name for name in self._folder.names() if key_of(name) == self._digest}
            self._seen = changed if changed < time.time_ns() - _SAME_TIME_NS else -1
        except OSError:
            names = set()
        for name in self.index.files - names:
            self.index.remove(name)
        for name in names - self.index.files:
            self._add(name)

    def _add(self, name: str) -> None:
        segment = read_header(self._folder.system, self._folder.path, name)
        if segment is not None and (segment.key, segment.block) == (self._key, self._block):
            self.index.add(name, segment.root, segment.ids, segment.entries)
        else:
            self.index.add(name, "", b"", ())  # so that it is not read again

    def _write(self, put: Put) -> None:
        found = self.index.find(put.root, put.ids)
        end, parts_at_end = self.index.find_end(put.root, put.ids)
        if 4 * end == len(put.ids) and parts_at_end:
            found.append(parts_at_end)
        path = list(dict.fromkeys(part.file for block in found for part in block.values()))
        now = time.time_ns()
        self._folder.touch(path, now)
        missing = [part for part in put.parts if part.block >= len(found) or part.kind not in found[part.block]]
        self.dropped += sum(part.nbytes for part in missing)
        if time.monotonic() < self._retry_at:
            return
        try:
            full = len(put.ids) // (4 * self._block)
            for parts in self._segments(_reachable(missing, len(found)), full):
                name, content = self._encode(put, parts)
                removed = self._folder.write(name, content, now - TICK_NS * len(path), keep=path)
                if removed is None:  # there is no room for more of this path
                    break
                for file in removed:
                    self.index.remove(file)
                self._add(name)
                path.append(name)
                nbytes = sum(part.nbytes for part in parts)
                self.written += nbytes
                self.dropped -= nbytes
            self._folder.sync()
            for name in self.index.superseded(put.root, put.ids, missing[0].block) if missing else ():
                self._folder.remove(name)
                self.index.remove(name)
        except OSError as error:
            self._fail(error)

    def _encode(self, put: Put, parts: Sequence[Part]) -> tuple[str, list[memoryview]]:
        ids = put.ids[: 4 * self._block * (parts[-1].block + 1)]
        metadata = {"model": self._model} if self._model else {}
        name, head = encode(self._key, put.root, self._block, ids, parts, metadata)
        return name, [memoryview(head), *chain.from_iterable(part.buffers for part in parts)]

    def _segments(self, parts: Iterable[Part], full: int) -> Iterator[list[Part]]:
        """Consecutive parts for each file. Those after `full` blocks have their own, which is deleted when more of the
        block is stored."""
        limit = min(SEGMENT_NBYTES, self._folder.max_bytes // 8)
        segment: list[Part] = []
        nbytes = 0
        for part in parts:
            if segment and (nbytes + part.nbytes > limit or segment[-1].block < full == part.block):
                yield segment
                segment, nbytes = [], 0
            segment.append(part)
            nbytes += part.nbytes
        if segment:
            yield segment

    def _fail(self, error: OSError) -> None:
        """Store nothing for a while, and warn the first time."""
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        if not self._warned:
            self._warned = True
            with suppress(OnwardWarning):  # where warnings are errors: nobody catches them in this thread
                warn(
                    f"the prefix cache in {self._folder.path!r} cannot be written ({error.strerror or error}): "
                    "new prefixes stay in memory only"
                )


def _reachable(parts: Iterable[Part], stored: int) -> Iterator[Part]:
    """The parts of blocks that can be found, when the first `stored` blocks of the path are stored."""
    for part in parts:
        if part.block == stored and part.kind == 0:
            stored += 1
        if part.block < stored:
            yield part
