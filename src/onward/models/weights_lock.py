"""`WeightsLock`: forwards read the weights of a model together, and an update writes them alone."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onward.errors import RequestError
from onward.util.process import renew_in_forks


class _OfThread(threading.local):
    """The lock of the current thread."""

    lock: Any = None


class WeightsLock:
    """The lock of a model's weights: `with lock.reading():` around a forward, `with lock.writing():` around an update.
    A copy is another lock.

    Each thread has a lock of its own, so that a step takes none that another thread holds; an update takes all of them.

    version: a number of the weights, which every update increases.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._of_thread = _OfThread()
        self._all = weakref.WeakSet[Any]()  # the locks of threads
        self._writing = threading.Lock()  # guards `_all`
        self._is_awaited = False  # by an update, which goes before further forwards
        renew_in_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.version,)

    def reading(self) -> Any:
        """The lock of this thread, which a forward holds; a forward may be inside another one."""
        lock = self._of_thread.lock
        if lock is None or (self._is_awaited and not lock._is_owned()):
            with self._writing:
                lock = lock or threading.RLock()
                self._of_thread.lock = lock
                self._all.add(lock)
        return lock

    def check_outside(self) -> None:
        """Raise `RequestError` in a thread that is running a forward, which could never wait for its end."""
        lock = self._of_thread.lock
        if lock is not None and lock._is_owned():
            raise RequestError("the weights cannot be updated inside a forward that reads them: do it after the call")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wait for the end of the running forwards, and hold others off."""
        self.check_outside()
        self._is_awaited = True
        with self._writing:
            self._is_awaited = True  # another update may just have ended
            locks = list(self._all)
            try:
                for lock in locks:
                    lock.acquire()
                yield
            finally:
                self._is_awaited = False
                for lock in locks:
                    if lock._is_owned():  # an interrupt may have come before
                        lock.release()

    def renew(self) -> None:
        """In a forked child, which has one thread."""
        own = self._of_thread.lock
        if own is not None and not own._is_owned():  # another thread may have had it for an update
            own = self._of_thread.lock = None
        self._writing, self._is_awaited = threading.Lock(), False
        self._all = weakref.WeakSet(() if own is None else (own,))
