"""Fork safety, interrupts and garbage collection.

A fork copies memory but only one thread. A lock that another thread held stays locked in the child forever, and the
data it guards may be half written. `Renewable` objects replace their locks in the child. (They are plain `threading`
locks: one with an `__enter__` in Python could stay locked after an interrupt inside it.)
"""

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


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


def _renew_child() -> None:
    for renewable in list(_renewables):
        renewable.renew()
    for callback in _callbacks:
        callback()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_child)


class _DeferredInterrupt:
    """A handler that remembers SIGINT for `handler`."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler, self.received = handler, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = True


@contextmanager
def sigint_deferred() -> Iterator[None]:
    """Handle SIGINT (Ctrl-C) at the end of the block, by the handler that was installed before it. So an interrupt does
    not cut short a change of several steps.

    In the main thread this takes 8 µs; in others nothing, because Python runs no signal handlers there. Blocks may be
    nested.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    # Without a handler in Python, the system's ends the process, or nothing does.
    if not callable(handler) or isinstance(handler, _DeferredInterrupt):
        yield
        return
    deferred = _DeferredInterrupt(handler)
    signal.signal(signal.SIGINT, deferred)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is deferred:
            signal.signal(signal.SIGINT, handler)
        if deferred.received:
            handler(signal.SIGINT, None)


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable the cyclic garbage collector for work that makes very many objects and no cycles. Otherwise it would
    repeatedly traverse all objects of the process, including torch's, which may take longer than the work."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
