"""JSON as a model writes it, read character by character and never written anew."""

import json
import re
from collections.abc import Callable

from onward.messages.source import Reading, Source

_IN_STRING = re.compile(r'[^"\\]*')
# Outside of strings: what separates values, numbers, true, false, null, and Python's words for them.
_BETWEEN = re.compile(r"[\s,:\w.+-]*")
_SCALAR = re.compile(r"[\w.+-]*")
_CLOSES = {"}": "{", "]": "["}


def read_value(source: Source, give: Callable[[str], object]) -> Reading[bool]:
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


def read_string(source: Source) -> Reading[str | None]:
    """Read a string and return what it says; None where there is no whole string."""
    parts: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from _read_string(source, parts.append)):
        return None
    try:
        text = json.loads("".join(parts), strict=False)
    except ValueError:  # an escape that JSON does not have
        return None
    return text if isinstance(text, str) else None


def _read_string(source: Source, give: Callable[[str], object]) -> Reading[bool]:
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


def _read_char(source: Source, char: str, give: Callable[[str], object]) -> Reading[None]:
    yield from source.skip(char)
    give(char)
