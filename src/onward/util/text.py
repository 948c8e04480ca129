"""Short reprs, readable sizes, and prefixes of strings at the end of a text."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

_MAX_ITEMS = 8
_MAX_LENGTH = 200


def brief_list(items: Sequence[Any]) -> str:
    """The repr of a list; of a long one only the first items and the length."""
    if len(items) <= _MAX_ITEMS:
        return repr(list(items))
    return f"[{', '.join(map(repr, items[:_MAX_ITEMS]))}, … {len(items)} in all]"


def brief(value: object) -> str:
    """The truncated repr of any value, even of numbers that Python refuses to print. Values of any size take little
    time."""
    try:
        text = repr(_clipped(value, 8))
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"


def _clipped(value: Any, depth: int) -> Any:
    """A value with the same first `_MAX_LENGTH` characters of its repr."""
    kind = type(value)
    if kind is str or kind is bytes:
        return value[: _MAX_LENGTH + 1]
    if kind not in (dict, list, tuple) or (depth and not value):
        return value
    if not depth:
        return ...
    if kind is dict:
        return {key: _clipped(item, depth - 1) for key, item in islice(value.items(), _MAX_LENGTH)}
    items = [_clipped(item, depth - 1) for item in value[:_MAX_LENGTH]]
    return items if kind is list else tuple(items)


def described(of: object, *facts: str) -> str:
    """A repr such as `<KVCache: 2 rows, 256 positions>`, without empty facts."""
    return f"<{type(of).__name__}: {', '.join(fact for fact in facts if fact)}>"


def in_bytes(count: int) -> str:
    """A size such as '5.3 MB', with units of 1000 like disks and model cards."""
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.3g} {units[0]}"


def unfinished(text: str, strings: Iterable[str]) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of one of `strings`."""
    longest = 0
    for string in strings:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest
