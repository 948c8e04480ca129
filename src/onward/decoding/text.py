"""Tokens to text as they come: stop strings never leak, half characters never show."""

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, Self

from onward.beginnings import unfinished
from onward.decoding.detokenizer import Detokenizer


class Mark(NamedTuple):
    """A special token that says something, though it is no part of the text.

    position: how many characters of the text stand before it, if no stop string ends the text earlier.
    at: which of the text's tokens it is. text: how it is written.
    """

    position: int
    at: int
    text: str


class TextStream(Protocol):
    """Turns one row's tokens into text that is final when it is given out."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; None while the text goes on."""
        ...

    @property
    def marks(self) -> Sequence[Mark]:
        """The marks so far, in order."""
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
    marks: Sequence[Mark] = ()

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def fork(self) -> Self:
        return self


class StopStrings:
    """A `TextStream` that ends before the first stop string, also one that spans several tokens.

    Text that may be the beginning of a stop string is held back until it is clear that it is not.

    marks: the special tokens to note, and how each is written.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), marks: Mapping[int, str] | None = None
    ) -> None:
        self.stopped_by: str | None = None
        self.marks: list[Mark] = []
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._marks = marks or {}
        self._held = ""
        self._tokens = self._characters = 0  # that came, also those that are held

    def push(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        self._characters += len(text)
        if token_id in self._marks:
            self.marks.append(Mark(self._characters, self._tokens, self._marks[token_id]))
        self._tokens += 1
        return self._admit(text)

    def flush(self) -> str:
        text = self._admit(self._detokenizer.flush())
        rest, self._held = self._held, ""
        return text + rest

    def fork(self) -> Self:
        other = copy.copy(self)
        other._detokenizer, other.marks = self._detokenizer.fork(), self.marks.copy()
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
        ready = len(self._held) - unfinished(self._held, self._stop)
        text, self._held = self._held[:ready], self._held[ready:]
        return text
