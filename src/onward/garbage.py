"""When Python does not look for cyclic garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
