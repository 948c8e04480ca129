"""From what users give as `draft` to a speculator."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from onward.speculation import LOOKUPS, Drafter, Speculator, as_drafter

__all__ = ["LOOKUPS", "Speculators"]

# Speculators kept, with what they learnt, programs of draft models too.
_KEPT = 8


class Speculators:
    """The speculators of one language model: one for each draft that was asked for, kept for further requests."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, tuple[Any, Speculator]] = OrderedDict()

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
        """The speculator kept under `key`, made where there is none. `draft` is kept with it, for its id's sake."""
        if key not in self._kept:
            self._kept[key] = (draft, Speculator(make()))
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][1]
