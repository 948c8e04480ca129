"""Text that comes in parts, for readers that go through it once from left to right.

A reader is a generator: it yields where it needs more text, and goes on where it was when there is more. So a format is
written down as if the whole text were there, and what is read does not depend on how the text was cut.
"""

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from onward.chat.message import MessageDelta, ToolCallDelta
from onward.util.text import unfinished

_T = TypeVar("_T")
# Yields where more text is needed, and returns what was read.
Reading: TypeAlias = Generator[None, None, _T]

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")


class TextReader:
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


_IN_STRING = re.compile(r'[^"\\]*')
# Outside of strings: what separates values, numbers, true, false, null, and Python's words for them.
_BETWEEN = re.compile(r"[\s,:\w.+-]*")
_SCALAR = re.compile(r"[\w.+-]*")
_CLOSES = {"}": "{", "]": "["}


def read_value(source: TextReader, give: Callable[[str], object]) -> Reading[bool]:
    """Read one value, handing on its characters as they come, exactly as they are.

    Returns:
        Whether it is whole. Otherwise the source stands at its end, or at a character that no JSON has there. Brackets
        and strings are checked; what stands between them is not.
    """
    first = yield from source.peek()
    if first == '"':
        return (yield from _read_string(source, give))
    if first not in ("{", "["):
        taken: list[str] = []
        yield from source.take(_SCALAR, taken.append)
        give("".join(taken))
        return bool(taken)
    opened: list[str] = []
    while True:
        char = yield from source.peek()
        if char == '"':
            if not (yield from _read_string(source, give)):
                return False
        elif char in ("{", "["):
            opened.append(char)
            yield from _read_char(source, char, give)
        elif char in _CLOSES and opened[-1] == _CLOSES[char]:
            opened.pop()
            yield from _read_char(source, char, give)
            if not opened:
                return True
        elif char and _BETWEEN.fullmatch(char):
            yield from source.take(_BETWEEN, give)
        else:
            return False


def read_string(source: TextReader) -> Reading[str | None]:
    """Read a string and return what it says; None where there is no whole string."""
    parts: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from _read_string(source, parts.append)):
        return None
    try:
        text = json.loads("".join(parts), strict=False)
    except ValueError:  # an escape that JSON does not have
        return None
    return text if isinstance(text, str) else None


def _read_string(source: TextReader, give: Callable[[str], object]) -> Reading[bool]:
    yield from _read_char(source, '"', give)
    while True:
        yield from source.take(_IN_STRING, give)
        char = yield from source.peek()
        if not char:
            return False
        yield from _read_char(source, char, give)
        if char == '"':
            return True
        escaped = yield from source.peek()
        if not escaped:
            return False
        yield from _read_char(source, escaped, give)


def _read_char(source: TextReader, char: str, give: Callable[[str], object]) -> Reading[None]:
    yield from source.skip(char)
    give(char)


class TextBuffer:
    """Text beside marks. Spaces and line breaks next to a mark lay the text out, and are no part of it.

    Where text goes on after a mark, the spaces before the mark part it from what stood there. Text without marks is
    given out whole.
    """

    def __init__(self, give: Callable[[str], object]) -> None:
        self._give = give
        self._space = ""  # at the end of the text so far
        self._has_words = self._skips = self._after_mark = False

    def add(self, text: str) -> None:
        if self._skips:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._skips = False
        whole = self._space + text
        words = whole.rstrip(SPACE)
        self._space = whole[len(words) :]
        if words:
            self._has_words, self._after_mark = True, False
            self._give(words)

    def mark(self) -> None:
        """A mark stands here."""
        if not self._has_words:
            self._space = ""
        self._skips = self._after_mark = True

    def paragraph(self) -> None:
        """What follows stands apart from what stood before."""
        if self._has_words:
            self._space, self._after_mark = "\n\n", True

    def end(self) -> None:
        """No more text will come."""
        if not self._after_mark:
            self._give(self._space)


class PlacedWords(TextBuffer):
    """Text beside marks, with its places in the answer.

    place: how many characters of the answer stand before the text that is added. spans: (begin, end) of all text.
    """

    def __init__(self, give: Callable[[str], object], place: Callable[[], int]) -> None:
        super().__init__(give)
        self._place = place
        self.spans: list[tuple[int, int]] = []

    def add(self, text: str) -> None:
        if text:
            begin = self._place()
            if self.spans and self.spans[-1][1] == begin:
                begin = self.spans.pop()[0]
            self.spans.append((begin, self._place() + len(text)))
        super().add(text)


class MessageBuilder:
    """The parts of one message in the order in which they are read.

    new_id: of the call with an index. place: how many characters of the answer are read. tools: those that were given,
    by name, maybe each with the JSON schema of its arguments; empty where they are not known.
    """

    def __init__(self, new_id: Callable[[int], str], place: Callable[[], int], tools: Collection[str] = ()) -> None:
        self._new_id, self._tools = new_id, tools
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._count = 0
        self.content = TextBuffer(self._content.append)
        self.reasoning = PlacedWords(self._reasoning.append, place)
        self.reasoning.mark()

    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._count > 0

    def knows(self, name: str) -> bool:
        """Whether a tool of this name was given."""
        return not self._tools or name in self._tools

    def schema(self, name: str) -> Mapping[str, Any]:
        """Of a tool's arguments; empty where it is not known."""
        return self._tools.get(name, {}) if isinstance(self._tools, Mapping) else {}

    def call(self, name: str, id: str | None = None) -> None:
        """A call begins. id: where the model gave it one."""
        self.content.mark()
        self._calls.append(ToolCallDelta(self._count, id or self._new_id(self._count), name))
        self._count += 1

    def arguments(self, text: str) -> None:
        """The next characters of the arguments of the call that began last."""
        if text:
            self._calls.append(ToolCallDelta(self._count - 1, arguments=text))

    def take(self) -> MessageDelta:
        """What was written since the last time."""
        calls: list[ToolCallDelta] = []
        for call in self._calls:
            if calls and calls[-1].index == call.index:
                last = calls.pop()
                call = ToolCallDelta(last.index, last.id, last.name, last.arguments + call.arguments)
            calls.append(call)
        delta = MessageDelta("".join(self._content), "".join(self._reasoning), tuple(calls))
        for parts in (self._content, self._reasoning, self._calls):
            parts.clear()
        return delta
