"""Threads that run functions for several clients in turn."""

import sys
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from onward.util.process import renew_in_forks

_Result = TypeVar("_Result")
_IDLE_SECONDS = 5.0  # after which a thread ends
_Call = Callable[[], Any]


_lanes: "weakref.WeakSet[Lane]" = weakref.WeakSet()
# Seconds after which a thread gives way to one that waits for the interpreter, while calls run. An event loop waits for
# it several times for each request, and Python's 5 ms, times the threads that compute, would add up.
_TURN = 0.0005


class _ShortTurns:
    """Inside, threads give way after `_TURN`, for all that are inside at once."""

    def __init__(self) -> None:
        self._before = sys.getswitchinterval()
        self.renew()
        renew_in_forks(self)

    def renew(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(_TURN, self._before))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._before)


_short_turns = _ShortTurns()


def busy() -> bool:
    """Whether a call runs in any lane."""
    return any(lane.running for lane in list(_lanes))


class Lane:
    """A queue with a fixed number of threads. Clients take turns, however many calls each has queued, and one client
    never occupies all threads of several.

    The threads start when needed. They don't keep the process alive: a call that runs at its end is abandoned.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._threads = name, threads
        self._most = max(1, threads - 1)  # running calls of one client
        self.renew()
        renew_in_forks(self)
        _lanes.add(self)

    def renew(self) -> None:
        """Forget all calls, also in a forked child, which has none of the threads."""
        self._changed = threading.Condition()
        # By client, in the order of their turns; of each, its calls in their order.
        self._queued: OrderedDict[str, OrderedDict[Future[Any], _Call]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._count = self._alive = self._idle = 0

    def __len__(self) -> int:
        """The number of queued calls."""
        return self._count

    @property
    def running(self) -> int:
        """The number of running calls."""
        return sum(self._running.values())

    def submit(self, call: Callable[[], _Result], client: str = "") -> "Future[_Result]":
        """Queue a call. Cancelling the future drops it from the queue."""
        future: Future[_Result] = Future()
        with self._changed:
            self._queued.setdefault(client, OrderedDict())[future] = call
            self._count += 1
            self._changed.notify()
            if (
                self._count > self._idle and self._alive < self._threads
            ):  # an idle thread may have been notified already
                self._alive += 1
                threading.Thread(target=self._work, name=f"onward-{self._name}", daemon=True).start()
        future.add_done_callback(lambda done: self._drop(client, done))
        return future

    def _drop(self, client: str, future: "Future[Any]") -> None:
        """Drop a cancelled call with all that it refers to."""
        if future.cancelled():
            with self._changed:
                self._take(client, future)

    def _take(self, client: str, future: "Future[Any]") -> _Call | None:
        calls = self._queued.get(client)
        call = None if calls is None else calls.pop(future, None)
        self._count -= call is not None
        if calls is not None and not calls:
            del self._queued[client]
        return call

    def _next(self) -> tuple[str, "Future[Any]", _Call] | None:
        for client, calls in self._queued.items():
            if self._running[client] < self._most:
                future = next(iter(calls))
                call = self._take(client, future)
                assert call is not None, "it is queued"
                if client in self._queued:
                    self._queued.move_to_end(client)
                self._running[client] += 1
                return client, future, call
        return None

    def _work(self) -> None:
        while (next_call := self._wait()) is not None:
            client, future, call = next_call
            try:
                _run(future, call)
            finally:
                del next_call, future, call  # don't refer to them while waiting
                with self._changed:
                    self._running[client] -= 1
                    if not self._running[client]:
                        del self._running[client]
                    self._changed.notify()

    def _wait(self) -> tuple[str, "Future[Any]", _Call] | None:
        """The next call; None after a while without one, when the thread shall end."""
        with self._changed:
            while (next_call := self._next()) is None:
                self._idle += 1
                notified = self._changed.wait(_IDLE_SECONDS)
                self._idle -= 1
                if not notified and not self._queued:
                    self._alive -= 1
                    return None
            return next_call


def _run(future: "Future[Any]", call: _Call) -> None:
    try:
        if future.set_running_or_notify_cancel():
            with _short_turns:
                result = call()
            future.set_result(result)
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, call  # else an error would refer to itself, and so keep all arguments until a collection
