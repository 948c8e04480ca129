"""Fork safety and garbage collection.

A fork copies memory but only one thread. A lock that another thread held stays locked in the child for ever, and what
that thread was writing stays half written. `Renewable` objects replace their locks in the child. (The locks are plain
`threading` locks: a lock class with an `__enter__` in Python would stay locked after an interrupt inside it.)
"""

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Renewable(Protocol):
    """An object that has a lock."""

    def renew(self) -> None:
        """In a forked child: make a new lock and, if the old one was locked, drop what it guards."""
        ...


_renewables: "weakref.WeakSet[Renewable]" = weakref.WeakSet()
_callbacks: list[Callable[[], None]] = []


def renew_in_forks(renewable: Renewable) -> None:
    """Call `renewable.renew` in every child that is forked while the object lives."""
    _renewables.add(renewable)


def call_in_forks(callback: Callable[[], None]) -> None:
    """Call `callback` in every child that is forked from now on."""
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
    """No cyclic garbage is looked for inside, for work that makes very many objects and no cycles.

    They would have all objects of the process, torch's too, looked through again and again, which may take longer than
    to make them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
