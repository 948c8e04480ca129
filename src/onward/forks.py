"""What a forked child does not take over: locks that are held in the parent, and what is half done there.

A fork copies the memory and one thread. What another thread had locked nobody unlocks in the child, and what it was
about to write stays as it is. (Locks stay those of `threading`, replaced in the child: a lock of our own with an
`__enter__` in Python would stay locked after an interrupt in it.)
"""

import os
import weakref
from collections.abc import Callable
from typing import Protocol


class Renewable(Protocol):
    """Something with a lock."""

    def renew(self) -> None:
        """In a forked child: take another lock and, if this one was locked, drop what it guards."""
        ...


_renewables: "weakref.WeakSet[Renewable]" = weakref.WeakSet()
_callbacks: list[Callable[[], None]] = []


def renew_in_forks(renewable: Renewable) -> None:
    """Have it renewed in every child that is forked while it lives."""
    _renewables.add(renewable)


def call_in_forks(callback: Callable[[], None]) -> None:
    """Have it called in every child that is forked from now on."""
    _callbacks.append(callback)


def _in_child() -> None:
    for renewable in list(_renewables):
        renewable.renew()
    for callback in _callbacks:
        callback()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
