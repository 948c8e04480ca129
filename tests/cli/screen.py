"""A terminal's screen, as far as words kept whole need one."""

import re

from wcwidth import wcswidth

_TOKENS = re.compile(r"\x1b\[(\d*)([A-Z])|(.)", re.DOTALL)


class Screen:
    """Rows of cells. Like a VT100 it lets a character stand in the last column before it begins another row."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rows: list[list[str]] = [[]]
        self._at = 0

    def write(self, text: str) -> None:
        for number, final, character in _TOKENS.findall(text):
            if final == "C":
                self._at = min(self._at + int(number), self._columns - 1)
            elif final == "K":
                del self._rows[-1][self._at :]
            elif character == "\r":
                self._at = 0
            elif character == "\n":
                self._rows.append([])
                self._at = 0
            elif character == "\t":
                self._put(" " * (8 - self._at % 8))
            else:
                assert not final, f"an unknown command {final}"
                self._put(character)

    def _put(self, character: str) -> None:
        row = self._rows[-1]
        if row and not character.isspace() and wcswidth(row[-1] + character) == wcswidth(row[-1]):
            row[-1] += character  # combines with what stands there
            return
        width = len(character) if character.isspace() else wcswidth(character)
        if self._at + width > self._columns:
            self._rows.append([])
            self._at = 0
        row = self._rows[-1]
        row += [""] * (self._at - len(row)) + ([""] * (width - 1) + [character] if width else [character])
        self._at += width

    def rows(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]
