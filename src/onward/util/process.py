"""Fork safety and garbage collection.

A fork copies memory but only one thread. A lock that another thread held stays locked in the child forever, and the
data it guards may be half written. `Renewable` objects replace their locks in the child. (They are plain `threading`
locks: one with an `__enter__` in Python could stay locked after an interrupt inside it.)
"""

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
