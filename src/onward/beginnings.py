"""Strings that a text may be about to write."""

from collections.abc import Iterable


def unfinished(text: str, strings: Iterable[str]) -> int:
    """The length of the longest end of `text` that begins one of `strings`, none of which it holds whole."""
    longest = 0
    for string in strings:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest
