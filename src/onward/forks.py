"""Renews locks in a forked child, and drops what the parent's other threads had half done.

A fork copies the memory, but only one thread. A lock that another thread held stays locked in the child for ever, and
what that thread was writing stays half written. (The locks are plain ones of `threading`, which the child replaces. A
class of our own, with an `__enter__` in Python, would stay locked after an interrupt in that method.)
"""

import os
import weakref
from collections.abc import Callable
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
