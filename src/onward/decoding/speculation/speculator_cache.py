"""The speculators that requests of one model share."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from onward.decoding.speculation.drafter import Drafter
from onward.decoding.speculation.speculator import Speculator, as_drafter
from onward.util.process import renew_in_forks

# The maximum number of cached speculators. Each holds what it has learned and the programs of its draft model.
_MAX_SPECULATORS = 8


class SpeculatorCache:
    """The speculators of one language model, one for each `draft`, for reuse by further requests."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Any, tuple[Any, Speculator]] = OrderedDict()
        self._lock = threading.RLock()  # requests come from several threads
        renew_in_forks(self)

    def renew(self) -> None:
        self._lock = threading.RLock()

    def get(self, draft: Any, make: Callable[[Any], Drafter] = as_drafter) -> Speculator | None:
        """The speculator for a value of `draft`. make: creates its drafter."""
        if draft is None or isinstance(draft, Speculator):
            return draft
        key = draft if isinstance(draft, str) else id(draft)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = (draft, Speculator(make(draft)))  # references `draft`, so that its id stays unique
                if len(self._entries) > _MAX_SPECULATORS:
                    self._entries.popitem(last=False)
            self._entries.move_to_end(key)
            return self._entries[key][1]
