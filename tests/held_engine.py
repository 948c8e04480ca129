"""An engine that waits for instructions of a test."""

import contextlib
import threading
from collections.abc import Iterator

from onward.engine import Engine


@contextlib.contextmanager
def held(engine: Engine) -> Iterator[threading.Event]:
    """The engine's thread stops at its next step: requests submitted meanwhile run together, however slowly this
    thread runs. The event is set once the engine has stopped there."""
    steps, reached, resume = engine._worker._steps, threading.Event(), threading.Event()
    by_kind = steps.by_kind

    def wait_for_resume(work):
        reached.set()
        resume.wait()
        return by_kind(work)

    steps.by_kind = wait_for_resume
    try:
        yield reached
    finally:
        steps.by_kind = by_kind
        resume.set()
