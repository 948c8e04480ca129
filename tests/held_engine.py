"""An engine that waits for instructions of a test."""

import contextlib
import threading
from collections.abc import Iterator

from onward.engine import Engine


@contextlib.contextmanager
def held(engine: Engine) -> Iterator[threading.Event]:
    """The engine's thread stops at its next step: requests submitted meanwhile run together, however slowly this
    thread runs. The event is set once the engine has stopped there."""
    steps, reached, goes_on = engine._worker._steps, threading.Event(), threading.Event()
    by_kind = steps.by_kind

    def when_it_goes_on(work):
        reached.set()
        goes_on.wait()
        return by_kind(work)

    steps.by_kind = when_it_goes_on
    try:
        yield reached
    finally:
        steps.by_kind = by_kind
        goes_on.set()
