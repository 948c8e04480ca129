"""Words kept whole at a terminal's edge, while the text is still being written."""

from functools import lru_cache

from wcwidth import wcswidth, wcwidth

_TAB = 8
# What does not begin a line, after characters that need no space between them.
_CLOSING = frozenset(".,:;!?)]}'\"%…’”、。，．：；！？）］｝」』】》〉～ー")  # noqa: RUF001
_UNBREAKABLE = frozenset("\u00a0\u202f\u2007")
# A word of more characters (combining ones, say, which take no column) begins anew: it is measured with each.
_LONGEST_WORD = 512


class WholeWords:
    """Turns text that comes in pieces into what a terminal shows without cutting a word at its edge.

    What comes is shown at once. A word that then turns out to cross the edge is erased and written again on the next
    line; spaces at the edge are left out. Between wide characters (Chinese, Japanese, emoji) a line may end anywhere
    but before closing punctuation. A word wider than the terminal is left to the terminal, which cuts it.

    Only CR, "cursor forward" and "erase in line" of ECMA-48 are used.
    """

    def __init__(self) -> None:
        self._columns = 0
        self._column = 0  # of the cursor; equal to the columns where the line is full
        self._start = 0  # where the word begins that ends at the cursor
        self._word = ""
        self._after_wide = False

    def fit(self, text: str, columns: int) -> str:
        """What to write for `text`, which has no control characters but newlines and tabs.

        columns: the terminal's width now, 1 or more. Where it has changed the terminal has moved what stands there: the
        word under way is then left as it is.
        """
        if columns != self._columns:
            self._columns = columns
            self._column = self._column % columns if self._column > columns else self._column
            self._begin_word()
        return "".join(map(self._fitted, text))

    def _fitted(self, character: str) -> str:
        if character == "\n":
            self._column = 0
            self._begin_word()
            return character
        if character.isspace() and character not in _UNBREAKABLE:
            return self._space(character)
        word = self._word + character
        width, grows = _cells(word), _cells(word) > _cells(self._word)
        wide = _cells(character) > 1
        may_end_before = grows and (wide or self._after_wide) and character not in _CLOSING
        if (may_end_before and self._word) or len(word) > _LONGEST_WORD:
            self._begin_word()
            word, width = character, _cells(character)
        # What adds no column belongs to the character before it.
        self._after_wide = wide if grows else self._after_wide
        fits = self._start + width <= self._columns
        if not fits and self._start:
            begin, before = self._start, self._word
            self._start, self._word, self._column = 0, word, width
            return f"\r\x1b[{begin}C\x1b[K\n{before}{character}" if before else f"\n{character}"
        if not fits:
            word, width = character, _cells(character)
        self._word, self._column = word, self._start + width
        return character

    def _space(self, character: str) -> str:
        width = _TAB - self._column % _TAB if character == "\t" else _cells(character)
        fits = self._column + width <= self._columns
        self._column = self._column + width if fits else self._columns
        self._begin_word()
        return character if fits else ""

    def _begin_word(self) -> None:
        self._start, self._word, self._after_wide = self._column, "", False


@lru_cache(maxsize=4096)
def _cells(text: str) -> int:
    """Columns of a text; what has no width of its own counts for none."""
    width = wcswidth(text)
    return width if width >= 0 else sum(max(0, wcwidth(character)) for character in text)
