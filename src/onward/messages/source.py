"""Text that comes in parts, for readers that go through it once from left to right.

A reader is a generator: it yields where it needs more text, and goes on where it was when there is more. So a format is
written down as if the whole text were there, and what is read does not depend on how the text was cut.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from onward.beginnings import unfinished

_T = TypeVar("_T")
# Yields where more text is needed, and returns what was read.
Reading: TypeAlias = Generator[None, None, _T]

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")


class Source:
    """Text in parts: what has come and is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._before = 0  # characters before it
        self._at = 0
        self._mark: int | None = None
        self._ended = False
        self._is_over = False

    def add(self, text: str) -> None:
        """More text has come."""
        first = self._at if self._mark is None else self._mark
        self._text = self._text[first:] + text
        self._before += first
        self._at -= first
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    @property
    def is_over(self) -> bool:
        """Whether a reader has wanted more text than there is, since the last `mark`."""
        return self._is_over

    @property
    def place(self) -> int:
        """How many characters are read. While text is handed on: how many stand before it."""
        return self._before + self._at

    # ── for readers ─────────────────────────────────────────────────────────────────────────────────────────────

    def mark(self) -> None:
        """Remember this place, to come back to it."""
        self._mark = self._at
        self._is_over = False

    def forget(self) -> None:
        """There will be no coming back."""
        self._mark = None

    def rewind(self) -> None:
        """Come back to the place that was marked."""
        assert self._mark is not None, "only a place that was marked can be found again"
        self._at, self._mark = self._mark, None

    def peek(self) -> Reading[str]:
        """The next character, which stays unread; empty at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        self._is_over |= self._at == len(self._text)
        return self._text[self._at : self._at + 1]

    def take(self, pattern: re.Pattern[str], give: Callable[[str], object] = len) -> Reading[None]:
        """Read as many characters as match, handing them on as they come. The pattern repeats single characters."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and match.end() > self._at:
                give(match.group())
                self._at = match.end()
            if self._at < len(self._text) or self._ended:
                self._is_over |= self._at == len(self._text)
                return
            yield

    def skip_space(self) -> Reading[None]:
        yield from self.take(_SPACES)

    def skip(self, string: str) -> Reading[bool]:
        """Read `string`, if it is what comes next; returns whether it was."""
        while True:
            rest = self._text[self._at : self._at + len(string)]
            if rest == string:
                self._at += len(string)
                return True
            if self._ended or not string.startswith(rest):
                self._is_over |= string.startswith(rest)
                return False
            yield

    def close(self, *strings: str) -> Reading[bool]:
        """Read one of `strings`, if it is what comes next, or what there is of it where the text ends within it.

        Returns:
            Whether one was there as a whole.
        """
        for string in strings:
            if (yield from self.skip(string)):
                return True
        if self.is_cut(strings):
            self._at = len(self._text)
        return False

    def is_cut(self, strings: Sequence[str]) -> bool:
        """Whether the text ends here, or within one of `strings`, for each of which `skip` has looked."""
        rest = self._text[self._at :]
        return self._ended and any(string.startswith(rest) for string in strings)

    def until(
        self, strings: Sequence[str], give: Callable[[str], object], is_cut: Callable[[], bool] = lambda: False
    ) -> Reading[str | None]:
        """Read up to and with the first of `strings`, handing on what stands before it as it comes.

        is_cut: whether the beginning of one of `strings` that stands at the end of the text is dropped, asked there.

        Returns:
            The string; None at the end. None of `strings` may begin another.
        """
        while True:
            found = {string: at for string in strings if (at := self._text.find(string, self._at)) >= 0}
            if found:
                first = min(found, key=found.__getitem__)
                give(self._text[self._at : found[first]])
                self._at = found[first] + len(first)
                return first
            rest = self._text[self._at :]
            held = 0 if self._ended and not is_cut() else unfinished(rest, strings)
            give(rest[: len(rest) - held])
            self._at += len(rest) - (0 if self._ended else held)
            if self._ended:
                return None
            yield
