"""Makes a speculator of what users pass as `draft`."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from onward.forks import renew_in_forks
from onward.speculation import LOOKUPS, Drafter, Speculator, as_drafter

__all__ = ["LOOKUPS", "Speculators"]

# The most speculators that are kept. Each keeps what it has learnt and the programs of its draft model.
_MOST_KEPT = 8


class Speculators:
    """The speculators of one language model, one for each draft asked for. They are kept for further requests."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, tuple[Any, Speculator]] = OrderedDict()
        self._lock = threading.RLock()  # requests come from several threads
        renew_in_forks(self)

    def renew(self) -> None:
        """In a forked child: a new lock."""
        self._lock = threading.RLock()

    def of(self, draft: Any) -> Speculator | None:
        """The speculator for `draft`: None, "lookup", "suffix", a `Model`, a `Drafter` or a `Speculator`.

        Raises:
            RequestError: anything else.
        """
        if draft is None or isinstance(draft, Speculator):
            return draft
        key = draft if isinstance(draft, str) else id(draft)
        return self.kept(key, draft, lambda: as_drafter(draft))

    def kept(self, key: Any, draft: Any, make: Callable[[], Drafter]) -> Speculator:
        """The speculator kept under `key`; where there is none, one is made.

        `draft` is kept with it: a key that is its `id` must not become that of another object.
        """
        with self._lock:
            if key not in self._kept:
                self._kept[key] = (draft, Speculator(make()))
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key][1]
