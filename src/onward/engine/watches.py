"""Those who wait in asyncio loops for generations: a step calls into each loop once, however many wait there."""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Watch(NamedTuple):
    """Who wants `changed()` called in a loop. pieces: also for new pieces, not for the end alone."""

    loop: asyncio.AbstractEventLoop
    changed: Callable[[], None]
    pieces: bool


class Watches:
    """What the engine's thread has to tell when a step is over. Only that thread uses it.

    A call into a loop wakes its thread, which then competes with this one for the interpreter. So there is one a step,
    made when this thread has nothing left to do but to run the model.
    """

    def __init__(self) -> None:
        self._due: dict[asyncio.AbstractEventLoop, dict[Callable[[], None], None]] = {}

    def note(self, watches: Iterable[Watch], *, ended: bool) -> None:
        """Something has changed for these. ended: it was the end."""
        for loop, changed, pieces in watches:
            if pieces or ended:
                self._due.setdefault(loop, {})[changed] = None

    def tell(self) -> None:
        """Call all that are due."""
        if not self._due:
            return
        due, self._due = self._due, {}
        for loop, changed in due.items():
            try:
                loop.call_soon_threadsafe(_call, changed)
            except RuntimeError:  # the loop is closed: nobody waits there any more
                continue


def _call(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()
