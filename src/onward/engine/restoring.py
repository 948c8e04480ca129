"""Reads prefixes from the disk for requests that have been admitted, one at a time, while the others run."""

import threading
from collections import deque
from collections.abc import Callable

from onward.cache.disk import Restoration
from onward.decoding import CacheManager
from onward.engine.request import EngineRequest


class Restorer:
    """The requests whose slots are to be filled from the disk, in order. Only the engine's thread calls its methods.

    A second thread reads. Meanwhile a request has its slot and takes no part in steps. Requests that were admitted
    together often begin with the same text: each one looks again for cached blocks when its turn comes, so that only
    the first one reads it.

    wake: called by the second thread when it has read.
    """

    def __init__(self, slots: CacheManager, wake: Callable[[], None]) -> None:
        self._slots, self._wake = slots, wake
        self._waiting: deque[tuple[EngineRequest, int]] = deque()  # with the number of those read before
        self._reading: _Reading | None = None
        self._count = 0

    def __bool__(self) -> bool:
        return self._reading is not None or bool(self._waiting)

    def add(self, request: EngineRequest) -> None:
        """Restore the slot of a request that has been admitted, if the disk has more of its text."""
        if request.is_restorable:
            request.restoring = True
            self._waiting.append((request, self._count))

    def advance(self) -> None:
        """Finish what has been read, and begin the next."""
        while self._reading is None or self._reading.read.is_set():
            if self._reading is not None:
                self._finish(self._reading)
            elif self._waiting:
                self._begin(*self._waiting.popleft())
            else:
                return

    def _begin(self, request: EngineRequest, count: int) -> None:
        try:
            restoration = request.restoration(again=count < self._count)
        except Exception as error:
            request.error, restoration = error, None
        if restoration is None:
            request.restoring = False
            return
        self._reading = reading = _Reading(request, restoration)
        reading.thread = threading.Thread(
            target=reading.run, args=(self._wake,), name="onward-prefix-read", daemon=True
        )
        reading.thread.start()

    def _finish(self, reading: "_Reading") -> None:
        self._reading, request = None, reading.request
        request.restoring = False
        self._count += 1
        try:
            request.take_restored(reading.restoration)
        except Exception as error:
            request.error = error

    def cancel(self, request: EngineRequest) -> None:
        """Read nothing more for a request whose slot is about to be released."""
        if not request.restoring:
            return
        request.restoring, reading = False, self._reading
        if reading is None or reading.request is not request:
            self._waiting = deque(each for each in self._waiting if each[0] is not request)
            return
        self._reading = None
        reading.cancelled.set()
        reading.thread.join()  # after the portion that it reads


class _Reading:
    """A restoration in a thread."""

    thread: threading.Thread

    def __init__(self, request: EngineRequest, restoration: Restoration) -> None:
        self.request, self.restoration = request, restoration
        self.cancelled, self.read = threading.Event(), threading.Event()

    def run(self, wake: Callable[[], None]) -> None:
        try:
            self.restoration.read(self.cancelled.is_set)
        finally:
            self.read.set()
            wake()
