"""Wakes the asyncio loops of callers after a step."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple


class Listener(NamedTuple):
    """A callback `changed` in an asyncio loop. pieces: call it for new pieces too, not only for the end."""

    loop: asyncio.AbstractEventLoop
    changed: Callable[[], None]
    pieces: bool


class LoopNotifier:
    """Collects the callbacks that are due after a step. Only the engine's thread uses it.

    A call into a loop wakes its thread, which then competes with this one for the interpreter. So each step makes one,
    when this thread has nothing left to do but run the model.
    """

    def __init__(self) -> None:
        self._due: dict[asyncio.AbstractEventLoop, dict[Callable[[], None], None]] = {}

    def add(self, listeners: Iterable[Listener]) -> None:
        for loop, changed, _ in listeners:
            self._due.setdefault(loop, {})[changed] = None

    def notify(self) -> None:
        due, self._due = self._due, {}
        for loop, changed in due.items():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_call, changed)


def _call(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()
