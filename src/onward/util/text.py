"""Short reprs, sizes in words, and strings that a text may be about to complete."""

from collections.abc import Iterable, Sequence
from typing import Any

_MOST_ITEMS = 8
_LONGEST = 200


def brief_list(items: Sequence[Any]) -> str:
    """A list as it is where it is short, else its first items and how many there are."""
    if len(items) <= _MOST_ITEMS:
        return repr(list(items))
    return f"[{', '.join(map(repr, items[:_MOST_ITEMS]))}, … {len(items)} in all]"


def brief(value: object) -> str:
    """The repr of any value at all, cut to a length: Python writes no numbers of thousands of digits."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def described(of: object, *facts: str) -> str:
    """Such as `<KVCache: 2 rows, 256 positions>`; facts that are empty are left out."""
    return f"<{type(of).__name__}: {', '.join(fact for fact in facts if fact)}>"


def in_bytes(count: int) -> str:
    """Such as '5.3 MB'; units of 1000, as disks and makers of models count."""
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.3g} {units[0]}"


def unfinished(text: str, strings: Iterable[str]) -> int:
    """The length of the longest end of `text` that begins one of `strings`, none of which it holds whole."""
    longest = 0
    for string in strings:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest
