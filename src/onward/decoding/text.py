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

    @property
    def ends(self) -> Sequence[int]:
        """How many characters are complete with each token, those of marks too; empty where marks are not noted."""
        ...

    def push(self, token_id: int) -> str: ...

    def flush(self, eos: int | None = None) -> str:
        """The text that was held back; for when no token follows. eos: the id that ended the text, if one did."""
        ...

    def fork(self) -> Self:
        """A copy that goes on from here by itself."""
        ...


class NoText:
    """A `TextStream` for rows whose text nobody asks for: it is always empty."""

    stopped_by = None
    marks: Sequence[Mark] = ()
    ends: Sequence[int] = ()

    def push(self, token_id: int) -> str:
        return ""

    def flush(self, eos: int | None = None) -> str:
        return ""

    def fork(self) -> Self:
        return self


class _Hidden(NamedTuple):
    """Characters of a special token among those held back. mark: to report once they are certain, if any."""

    begin: int
    end: int
    mark: Mark | None


class StopStrings:
    """A `TextStream` that ends before the first stop string, also one that spans several tokens.

    Stop strings are searched for in the text, and in the text with its special tokens written out, the eos included.
    Special tokens are never part of the text. Text that may be the beginning of a stop string is held back
    until it is clear that it is not.

    marks: the special tokens to report, and how each is written; None reports nothing. special: how the other special
    tokens are written.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        marks: Mapping[int, str] | None = None,
        special: Mapping[int, str] | None = None,
    ) -> None:
        self.stopped_by: str | None = None
        self.marks: list[Mark] = []
        self.ends: list[int] = []
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._marks, self._notes_ends = marks or {}, marks is not None
        self._special = {**(special or {}), **self._marks} if self._stop else self._marks
        self._held = ""
        self._hidden: tuple[_Hidden, ...] = ()  # of special tokens in it
        self._tokens = self._characters = self._of_marks = 0  # pushed so far, also those that are held back

    def push(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        self._characters += len(text)
        ready = self._admit(text)
        if token_id in self._special:
            written = self._special[token_id]
            mark = None
            if token_id in self._marks:
                mark = Mark(self._characters, self._tokens, written)
                self._of_marks += len(written)
            ready += self._admit_broken(written) + self._admit(written, _Hidden(0, len(written), mark))
        self._tokens += 1
        if self._notes_ends:
            self.ends.append(self._characters + self._of_marks)
        return ready

    def flush(self, eos: int | None = None) -> str:
        text = self._admit(self._detokenizer.flush())
        if eos is not None and eos in self._special:
            written = self._special[eos]
            text += self._admit(written, _Hidden(0, len(written), None))
        return text + self._release(len(self._held))

    def fork(self) -> Self:
        other = copy.copy(self)
        other._detokenizer = self._detokenizer.fork()
        other.marks, other.ends = self.marks.copy(), self.ends.copy()
        return other

    def _admit(self, text: str, hidden: _Hidden | None = None) -> str:
        """Add text to what is held back; returns what is final now. hidden: where the text is a special token's."""
        if self.stopped_by is not None:
            return ""
        if hidden is not None:
            begin = len(self._held)
            self._hidden += (_Hidden(begin, begin + hidden.end, hidden.mark),)
        self._held += text
        starts = {stop: start for stop in self._stop if (start := self._find(stop)) >= 0}
        if not starts:
            return self._release(self._certain())
        self.stopped_by = min(starts, key=starts.__getitem__)
        ready = self._release(starts[self.stopped_by])
        self._held, self._hidden = "", ()
        return ready

    def _find(self, stop: str) -> int:
        """Where a stop string begins in what is held back; -1 where it is not in it."""
        start = self._held.find(stop)
        if self._hidden and (in_shown := self._shown().find(stop)) >= 0:
            place = self._place(in_shown)
            return place if start < 0 else min(start, place)
        return start

    def _certain(self) -> int:
        """How many characters of what is held back are in no stop string that may still be completed."""
        certain = len(self._held) - unfinished(self._held, self._stop)
        if self._hidden and self._stop:
            shown = self._shown()
            certain = min(certain, self._place(len(shown) - unfinished(shown, self._stop)))
        return certain

    def _shown(self) -> str:
        """What is held back, less its special tokens."""
        ends = [0, *(hidden.end for hidden in self._hidden)]
        begins = [*(hidden.begin for hidden in self._hidden), len(self._held)]
        return "".join(self._held[end:begin] for end, begin in zip(ends, begins, strict=True))

    def _place(self, index: int) -> int:
        """The index in the pending text of the character with this index in `_shown`."""
        for begin, end, _ in self._hidden:
            if index < begin:
                break
            index += end - begin
        return index

    def _admit_broken(self, special: str) -> str:
        """The character that a special token breaks off, if that completes a stop string.

        Without its special tokens the text may go on with the rest of the character, so it is pending otherwise.
        """
        if not self._stop or self.stopped_by is not None or not (broken := self._detokenizer.fork().flush()):
            return ""
        text = self._held + broken + special
        return self._admit(self._detokenizer.flush()) if any(stop in text for stop in self._stop) else ""

    def _release(self, end: int) -> str:
        """Give out the first `end` characters of what is held back, less those of special tokens."""
        text, self._held = self._held[:end], self._held[end:]
        if not self._hidden:
            return text
        shown, at = "", 0
        for begin, after, mark in self._hidden:
            shown, at = shown + text[at:begin], after
            if mark is not None and after <= end:
                self.marks.append(mark)
        self._hidden = tuple(
            _Hidden(max(0, begin - end), after - end, mark) for begin, after, mark in self._hidden if after > end
        )
        return shown + text[at:]
