"""Tokens to text as they come: stop strings never leak, half characters never show."""

import copy
from collections.abc import Sequence
from typing import Protocol, Self

from onward.decoding.detokenizer import Detokenizer


class TextStream(Protocol):
    """Turns one row's tokens into text that is final when it is given out."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been met; nothing follows it."""
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

    stopped = False

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
        self.stopped = False
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
        if self.stopped:
            return ""
        self._held += text
        begins = [at for at in map(self._held.find, self._stop) if at >= 0]
        if begins:
            text, self._held, self.stopped = self._held[: min(begins)], "", True
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
