"""An engine that waits while a test tells it what to do."""

import contextlib
import threading
from collections.abc import Iterator

from onward.engine import Engine


@contextlib.contextmanager
def held(engine: Engine) -> Iterator[None]:
    """The engine's thread goes no further than its next step: requests that are submitted meanwhile run together,
    however slowly this thread runs."""
    steps, goes_on = engine._serving._steps, threading.Event()
    by_kind = steps.by_kind

    def when_it_goes_on(work):
        goes_on.wait()
        return by_kind(work)

    steps.by_kind = when_it_goes_on
    try:
        yield
    finally:
        steps.by_kind = by_kind
        goes_on.set()
