"""The inputs of custom tools: free text, which travels as the only argument of a call.

A model sees a custom tool as a function with one string, `input`. So its calls have the syntax of all others,
`{"name": "patch", "arguments": {"input": "*** Begin Patch\\n…"}}`, and the text is taken out of the arguments while
they are streamed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from onward.chat.message import INPUT
from onward.chat.source import Reading, TextReader, read_string

_PLAIN = re.compile(r'[^"\\]*')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_HEX = re.compile("[0-9A-Fa-f]")


@dataclass(frozen=True)
class InputFormat:
    """The texts that a custom tool takes. syntax: of the definition; "text" for any text, without a definition."""

    syntax: Literal["text", "lark", "regex"] = "text"
    definition: str = ""

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of a call's arguments."""
        about = f"Text that matches this grammar ({self.syntax}):\n{self.definition}"
        described: dict[str, Any] = {"type": "string"} | ({"description": about} if self.definition else {})
        if self.syntax == "regex":
            described["pattern"] = f"^(?:{self.definition})$"
        return {"type": "object", "properties": {INPUT: described}, "required": [INPUT]}


class InputReader:
    """Takes the input out of the arguments of a call, as they arrive. Arguments in another form are the input.

    give: takes the input's text.
    """

    def __init__(self, give: Callable[[str], object]) -> None:
        self._source = TextReader()
        self._reading = _read_input(self._source, give)
        next(self._reading, None)

    def feed(self, text: str) -> None:
        self._source.add(text)
        next(self._reading, None)

    def finish(self) -> None:
        self._source.end()
        next(self._reading, None)


def _read_input(source: TextReader, give: Callable[[str], object]) -> Reading[None]:
    source.mark()
    if (yield from _read_key(source)):
        source.forget()
        yield from _read_text(source, give)
        give = len  # the end of the object
    else:
        source.rewind()
    yield from source.until((), give)


def _read_key(source: TextReader) -> Reading[bool]:
    """Read through the quote before the text; return whether it is there."""
    yield from source.skip_space()
    if not (yield from source.skip("{")):
        return False
    yield from source.skip_space()
    if (yield from read_string(source)) != INPUT:
        return False
    yield from source.skip_space()
    if not (yield from source.skip(":")):
        return False
    yield from source.skip_space()
    return (yield from source.skip('"'))


def _read_text(source: TextReader, give: Callable[[str], object]) -> Reading[None]:
    """Read a JSON string after its first quote. Incomplete or invalid escapes are kept as they are."""
    while True:
        yield from source.take(_PLAIN, give)
        if not (yield from source.skip("\\")):
            yield from source.skip('"')
            return
        letter = yield from source.peek()
        yield from source.skip(letter)
        give((yield from _read_unicode(source)) if letter == "u" else _ESCAPES.get(letter, letter))


def _read_unicode(source: TextReader) -> Reading[str]:
    """Read the digits of an escape after its "u", and the second half of a surrogate pair."""
    code = yield from _read_digits(source)
    if 0xD800 <= code < 0xDC00 and (yield from source.skip("\\u")):
        low = yield from _read_digits(source)
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else 0xFFFD
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)


def _read_digits(source: TextReader) -> Reading[int]:
    digits = ""
    while len(digits) < 4 and _HEX.fullmatch(digit := (yield from source.peek())):
        yield from source.skip(digit)
        digits += digit
    return int(digits, 16) if len(digits) == 4 else 0xFFFD
