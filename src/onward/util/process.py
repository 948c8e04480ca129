"""Fork safety, interrupts and garbage collection.

A fork copies memory but only one thread. A lock that another thread held stays locked in the child forever, and the
data it guards may be half written. `Renewable` objects replace their locks in the child. (They are plain `threading`
locks: one with an `__enter__` in Python could stay locked after an interrupt inside it.)
"""

import _signal  # type: ignore[import-not-found]  # `signal.signal` takes ten times as long: it looks for an enum
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar, Protocol


class Renewable(Protocol):
    def renew(self) -> None:
        """In a forked child: make a new lock and, if the old one was locked, drop the data it guards."""


_renewables: "weakref.WeakSet[Renewable]" = weakref.WeakSet()
_callbacks: list[Callable[[], None]] = []


def renew_in_forks(renewable: Renewable) -> None:
    """Call `renewable.renew` in every forked child while the object lives."""
    _renewables.add(renewable)


def call_in_forks(callback: Callable[[], None]) -> None:
    """Call `callback` in every forked child from now on."""
    _callbacks.append(callback)


def module_lock(module: dict[str, Any]) -> threading.Lock:
    """A lock for the global `_lock` of a module, which forked children replace. module: its `globals()`."""
    call_in_forks(lambda: module.update(_lock=threading.Lock()))
    return threading.Lock()


def _renew_child() -> None:
    for renewable in list(_renewables):
        renewable.renew()
    for callback in _callbacks:
        callback()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_child)


def lower_priority() -> None:
    """Let all other threads go before this one and those that it starts. Linux only; a no-op elsewhere."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class sigint_deferred:  # noqa: N801 - used as a function
    """Handle SIGINT (Ctrl-C) at the end of the block, by the handler that was installed before it. So an interrupt does
    not cut short a change of several steps.

    In the main thread this takes about 2 µs; in others and in nested blocks it does nothing, because Python runs no
    signal handlers there. (Not `contextlib.contextmanager`, which takes twice as long.)
    """

    __slots__ = ("_handler", "_received")
    # The block of the main thread, if it is in one, and that thread: a child forked by another one lacks it.
    _current: "ClassVar[tuple[sigint_deferred, int] | None]" = None

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._received = False

    def __enter__(self) -> None:
        if sigint_deferred._current is not None or threading.current_thread() is not threading.main_thread():
            return
        handler = _signal.getsignal(_signal.SIGINT)
        if callable(handler):  # otherwise the system's handler ends the process, or nothing does
            _signal.signal(_signal.SIGINT, self._receive)
            self._handler, sigint_deferred._current = handler, (self, threading.get_ident())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def __exit__(self, *_: object) -> None:
        handler = self._handler
        if handler is None:
            return
        sigint_deferred._current = None
        if _signal.getsignal(_signal.SIGINT) == self._receive:  # not one that the block has installed
            _signal.signal(_signal.SIGINT, handler)
        if self._received:
            handler(_signal.SIGINT, None)

    @staticmethod
    def renew() -> None:
        """In a forked child: end the block of a thread that the child lacks."""
        current, sigint_deferred._current = sigint_deferred._current, None
        if current is not None and current[1] == threading.get_ident():
            sigint_deferred._current = current
        elif current is not None and current[0]._handler is not None:
            _signal.signal(_signal.SIGINT, current[0]._handler)


call_in_forks(sigint_deferred.renew)


@contextmanager
def without_collections(*, long_lived: bool = False) -> Iterator[None]:
    """Disable the cyclic garbage collector for work that makes very many objects and no cycles. Otherwise it would
    repeatedly traverse all objects of the process, including torch's, which may take longer than the work.

    long_lived: the objects live as long as the process, as those of modules do. They become old without a traversal.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if long_lived and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # moves them to the oldest generation
            gc.enable()
