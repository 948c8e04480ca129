"""Tokens to text as they come: stop strings never leak, half characters never show."""

import copy
from collections.abc import Sequence
from typing import Protocol, Self

from onward.decoding.detokenizer import Detokenizer


class TextStream(Protocol):
    """Turns one row's tokens into text that is final when it is given out."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has been met; nothing follows it."""
        ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """What was held back, when no token follows."""
        ...

    def fork(self) -> Self:
        """One that goes on from here by itself."""
        ...


class NoText:
    """For rows whose text nobody asks for."""

    stopped_by = None

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def fork(self) -> Self:
        return self


class StopStrings:
    """A `TextStream` that ends before the first of `stop`, wherever tokens cut it.

    Text that may turn out to begin a stop string is held back until it does not.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped_by: str | None = None
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._held = ""

    def push(self, token_id: int) -> str:
        return self._admit(self._detokenizer.push(token_id))

    def flush(self) -> str:
        text = self._admit(self._detokenizer.flush())
        held, self._held = self._held, ""
        return text + held

    def fork(self) -> Self:
        other = copy.copy(self)
        other._detokenizer = self._detokenizer.fork()
        return other

    def _admit(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        self._held += text
        begins = {stop: at for stop in self._stop if (at := self._held.find(stop)) >= 0}
        if begins:
            self.stopped_by = min(begins, key=begins.__getitem__)
            text, self._held = self._held[: begins[self.stopped_by]], ""
            return text
        ready = len(self._held) - self._longest_begun()
        text, self._held = self._held[:ready], self._held[ready:]
        return text

    def _longest_begun(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
