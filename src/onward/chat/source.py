"""Streaming text readers, and the message that they build.

A reader is a generator that yields when it needs more text. So a format is described as if the whole text were there,
and the result does not depend on how the text is split.
"""

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

from onward.chat.message import MessageDelta, ToolCallDelta, ToolKind
from onward.util.text import unfinished

_T = TypeVar("_T")
# Yields when more text is needed, and returns the result.
Reading: TypeAlias = Generator[None, None, _T]

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")


class TextReader:
    """A buffer of the text that has arrived but is not read yet.

    is_over: whether a reader has reached the end of the whole text since the last `mark`.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._text = ""
        self._start = 0  # of `_text` in the whole text
        self._at = 0
        self._mark: int | None = None
        self._ended = False

    def add(self, text: str) -> None:
        first = self._at if self._mark is None else self._mark
        self._text = self._text[first:] + text
        self._start += first
        self._at -= first
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        self._ended = True

    @property
    def place(self) -> int:
        """The number of characters read. During a `give` callback: the offset of its text."""
        return self._start + self._at

    def mark(self) -> None:
        self._mark = self._at
        self.is_over = False

    def forget(self) -> None:
        self._mark = None

    def rewind(self) -> None:
        """Return to the mark, and drop it."""
        assert self._mark is not None, "rewind needs a mark"
        self._at, self._mark = self._mark, None

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; an empty string at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        self.is_over |= self._at == len(self._text)
        return self._text[self._at : self._at + 1]

    def take(self, pattern: re.Pattern[str], give: Callable[[str], object] = len) -> Reading[None]:
        """Pass all matching characters to `give` as they arrive. The pattern must repeat single characters."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and match.end() > self._at:
                give(match.group())
                self._at = match.end()
            if self._at < len(self._text) or self._ended:
                self.is_over |= self._at == len(self._text)
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read and return all matching characters, as in `take`."""
        parts: list[str] = []
        yield from self.take(pattern, parts.append)
        return "".join(parts)

    def skip_space(self) -> Reading[None]:
        yield from self.take(_SPACES)

    def skip(self, string: str) -> Reading[bool]:
        """Read `string` if it comes next; return whether it does."""
        while True:
            rest = self._text[self._at : self._at + len(string)]
            if rest == string:
                self._at += len(string)
                return True
            if self._ended or not string.startswith(rest):
                self.is_over |= string.startswith(rest)
                return False
            yield

    def close(self, *strings: str) -> Reading[bool]:
        """Read one of `strings`, or its beginning at the end of the text; return whether it is complete."""
        for string in strings:
            if (yield from self.skip(string)):
                return True
        if self.is_cut(strings):
            self._at = len(self._text)
        return False

    def is_cut(self, strings: Sequence[str]) -> bool:
        """Whether the text ends here or within one of `strings`; call `skip` for each of them first."""
        rest = self._text[self._at :]
        return self._ended and any(string.startswith(rest) for string in strings)

    def until(
        self, strings: Sequence[str], give: Callable[[str], object], is_cut: Callable[[], bool] = lambda: False
    ) -> Reading[str | None]:
        """Read through the first of `strings`, and pass the text before it to `give` as it arrives.

        strings: none may be a prefix of another. is_cut: called at the end of the text; whether to drop an incomplete
        string there.

        Returns:
            The string, or None at the end of the text.
        """
        while True:
            found = {string: at for string in strings if (at := self._text.find(string, self._at)) >= 0}
            if found:
                first = min(found, key=found.__getitem__)
                give(self._text[self._at : found[first]])
                self._at = found[first] + len(first)
                return first
            rest = self._text[self._at :]
            pending = 0 if self._ended and not is_cut() else unfinished(rest, strings)
            give(rest[: len(rest) - pending])
            self._at += len(rest) - (0 if self._ended else pending)
            if self._ended:
                return None
            yield


_IN_STRING = re.compile(r'[^"\\]*')
# Outside of strings: separators, numbers, and the literals of JSON and Python.
_BETWEEN = re.compile(r"[\s,:\w.+-]*")
_SCALAR = re.compile(r"[\w.+-]*")
_CLOSES = {"}": "{", "]": "["}


def read_value(source: TextReader, give: Callable[[str], object]) -> Reading[bool]:
    """Read one JSON value, and pass its characters to `give` unchanged as they arrive.

    Returns:
        Whether the value is complete. If not, the source is at the end, or at a character that is invalid there.
        Brackets and strings are checked; the text between them is not.
    """
    first = yield from source.peek()
    if first == '"':
        return (yield from _read_string(source, give))
    if first not in ("{", "["):
        scalar = yield from source.word(_SCALAR)
        give(scalar)
        return bool(scalar)
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
    """Read a JSON string and return its value; None if it is not a complete string."""
    parts: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from _read_string(source, parts.append)):
        return None
    try:
        return str(json.loads("".join(parts), strict=False))
    except ValueError:  # an invalid escape
        return None


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
    """Text between marks, without the whitespace next to a mark.

    Text on both sides of a mark is separated by the whitespace before it. Text without marks is unchanged.
    place: returns the offset of added text in the answer. spans: (begin, end) of all text, if there is a `place`.
    """

    def __init__(self, give: Callable[[str], object], place: Callable[[], int] | None = None) -> None:
        self.spans: list[tuple[int, int]] = []
        self._give, self._place = give, place
        self._space = ""  # at the end of the text so far
        self._has_text = self._skips = self._after_mark = False

    def add(self, text: str) -> None:
        if self._place is not None and text:
            begin = end = self._place()
            if self.spans and self.spans[-1][1] == begin:
                begin = self.spans.pop()[0]
            self.spans.append((begin, end + len(text)))
        if self._skips:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._skips = False
        whole = self._space + text
        text = whole.rstrip(SPACE)
        self._space = whole[len(text) :]
        if text:
            self._has_text, self._after_mark = True, False
            self._give(text)

    def mark(self) -> None:
        if not self._has_text:
            self._space = ""
        self._skips = self._after_mark = True

    def paragraph(self) -> None:
        if self._has_text:
            self._space, self._after_mark = "\n\n", True

    def end(self) -> None:
        if not self._after_mark:
            self._give(self._space)


class Input(Protocol):
    """Reads the input of a custom tool from the arguments of a call."""

    def feed(self, text: str) -> None: ...

    def finish(self) -> None: ...


# Makes an input that gives its text to a function.
NewInput: TypeAlias = Callable[[Callable[[str], object]], Input]


class MessageBuilder:
    """The message that a reader builds.

    new_id: returns the id of the call at an index. place: returns the number of characters read. tools: the names of
    the request's tools, or a mapping from names to JSON schemas of their arguments; empty if they are unknown.
    continues: whether it continues a message. inputs: how to read the inputs of the custom tools.
    """

    def __init__(
        self,
        new_id: Callable[[int], str],
        place: Callable[[], int],
        tools: Collection[str] = (),
        continues: bool = False,
        inputs: Mapping[str, NewInput] = MappingProxyType({}),
    ) -> None:
        self._inputs = inputs
        self._input: Input | None = None  # of the last call
        self.continues = continues
        self._new_id, self._tools = new_id, tools
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._count = 0
        self.content = TextBuffer(self._content.append)
        self.reasoning = TextBuffer(self._reasoning.append, place)
        if not continues:
            self.reasoning.mark()

    def has_calls(self) -> bool:
        return self._count > 0

    def knows(self, name: str) -> bool:
        """Whether the request has a tool of this name."""
        return not self._tools or name in self._tools

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the schema of a tool's arguments; empty if it is unknown."""
        return self._tools.get(name, {}) if isinstance(self._tools, Mapping) else {}

    def call(self, name: str, id: str | None = None) -> None:
        """Begin a call. id: the model's own, if any."""
        self.content.mark()
        self.end_call()
        kind: ToolKind = "custom" if name in self._inputs else "function"
        self._calls.append(ToolCallDelta(self._count, id or self._new_id(self._count), name, type=kind))
        self._count += 1
        if name in self._inputs:
            self._input = self._inputs[name](self._add_input)

    def _add_input(self, text: str) -> None:
        if text:
            self._calls.append(ToolCallDelta(self._count - 1, arguments=text, type="custom"))

    def end_call(self) -> None:
        """End the last call."""
        if self._input is not None:
            self._input.finish()
            self._input = None

    def arguments(self, text: str) -> None:
        """Extend the arguments of the last call."""
        if self._input is not None:
            self._input.feed(text)
        elif text:
            self._calls.append(ToolCallDelta(self._count - 1, arguments=text))

    def take(self) -> MessageDelta:
        """Return what was added since the last call of `take`."""
        calls: list[ToolCallDelta] = []
        for call in self._calls:
            if calls and calls[-1].index == call.index:
                last = calls.pop()
                call = ToolCallDelta(last.index, last.id, last.name, last.arguments + call.arguments, call.type)
            calls.append(call)
        delta = MessageDelta("".join(self._content), "".join(self._reasoning), tuple(calls))
        for parts in (self._content, self._reasoning, self._calls):
            parts.clear()
        return delta
