"""`WeightsLock`: forwards read the weights of a model together, and an update writes them alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Self

from onward.errors import RequestError
from onward.util.process import renew_in_forks


class WeightsLock:
    """The lock of a model's weights, which a forward holds as a context manager. A copy is another lock.

    version: a number of the weights, which every update increases.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._changed = threading.Condition()
        self._readers: dict[int, int] = {}  # how often each thread has entered
        self._is_closed = False  # to other readers, by one that writes or waits
        renew_in_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.version,)

    def __enter__(self) -> Self:
        # Every step enters, so it takes no lock: a reader first counts itself and then looks for a writer, which first
        # closes and then looks for readers.
        thread, readers = get_ident(), self._readers
        depth = readers.get(thread, 0)
        readers[thread] = depth + 1
        while self._is_closed and not depth:
            self._leave(thread)
            with self._changed:
                while self._is_closed:
                    self._changed.wait()
            readers[thread] = 1
        return self

    def __exit__(self, *_: object) -> None:
        thread, readers = get_ident(), self._readers
        if (depth := readers[thread]) > 1:
            readers[thread] = depth - 1
        else:
            self._leave(thread)

    def _leave(self, thread: int) -> None:
        del self._readers[thread]
        if self._is_closed:
            with self._changed:
                self._changed.notify_all()

    def check_outside(self) -> None:
        """Raise `RequestError` in a thread that is running a forward, which could never wait for its end."""
        if get_ident() in self._readers:
            raise RequestError("the weights cannot be updated inside a forward that reads them: do it after the call")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wait for the end of the running forwards, and hold others off."""
        self.check_outside()
        with self._changed:
            while self._is_closed:
                self._changed.wait()
            self._is_closed = True
        try:
            with self._changed:
                while self._readers:
                    self._changed.wait()
            yield
        finally:
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()

    def renew(self) -> None:
        """In a forked child, which has one thread."""
        own = self._readers.get(get_ident())
        self._changed, self._is_closed = threading.Condition(), False
        self._readers = {} if own is None else {get_ident(): own}
