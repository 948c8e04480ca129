"""Tokens to text as they come: stop strings never leak, half characters never show."""

import copy
from collections.abc import Sequence
from typing import Protocol, Self

from onward.decoding.detokenizer import Detokenizer


class TextStream(Protocol):
    """Turns one row's tokens into text that is final when it is given out."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; None while the text goes on."""
        ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """The text that was held back; for when no token follows."""
        ...

    def fork(self) -> Self:
        """A copy that goes on from here by itself."""
        ...


class NoText:
    """A `TextStream` for rows whose text nobody asks for: it is always empty."""

    stopped_by = None

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def fork(self) -> Self:
        return self


class StopStrings:
    """A `TextStream` that ends before the first stop string, also one that spans several tokens.

    Text that may be the beginning of a stop string is held back until it is clear that it is not.
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
        rest, self._held = self._held, ""
        return text + rest

    def fork(self) -> Self:
        other = copy.copy(self)
        other._detokenizer = self._detokenizer.fork()
        return other

    def _admit(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        self._held += text
        starts = {stop: start for stop in self._stop if (start := self._held.find(stop)) >= 0}
        if starts:
            self.stopped_by = min(starts, key=starts.__getitem__)
            text, self._held = self._held[: starts[self.stopped_by]], ""
            return text
        ready = len(self._held) - self._unfinished_stop()
        text, self._held = self._held[:ready], self._held[ready:]
        return text

    def _unfinished_stop(self) -> int:
        """The length of the longest end of the held text that is the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
