"""Words at a terminal's edge: whole where they fit a line, with nothing lost, however the text is cut in pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from screen import Screen
from wcwidth import wcswidth

from onward.cli.whole_words import WholeWords

TEXTS = st.text(st.sampled_from("abcdefgh  \n\té.,-日本語、。🙂\u0301"), max_size=120)


def shown(text: str, columns: int, cuts: list[int] | None = None) -> list[str]:
    """The rows of a screen on which a text was written, in pieces."""
    words, screen = WholeWords(), Screen(columns)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts or []), len(text)]
    for begin, end in pairwise(edges):
        screen.write(words.fit(text[begin:end], columns))
    return screen.rows()


def without_spaces(text: str) -> str:
    return "".join(text.split())


@given(TEXTS, st.integers(2, 40), st.lists(st.integers(0, 120), max_size=8))
def test_nothing_is_lost_and_pieces_do_not_matter(text: str, columns: int, cuts: list[int]) -> None:
    rows = shown(text, columns, cuts)
    assert without_spaces("".join(rows)) == without_spaces(text)
    assert rows == shown(text, columns)
    assert all(wcswidth(row) <= columns for row in rows)


@given(st.lists(st.text("abcdefgh", min_size=1, max_size=9), max_size=30), st.integers(9, 30))
def test_words_that_fit_a_line_stand_on_one(words: list[str], columns: int) -> None:
    rows = shown(" ".join(words), columns, list(range(0, 200, 3)))
    assert [word for row in rows for word in row.split()] == words
    # None begins a line where it would have fitted the one before.
    for before, after in pairwise(rows):
        assert len(before) + 1 + len(after.split()[0]) > columns


@pytest.mark.parametrize(
    ("text", "columns", "rows"),
    [
        ("the little dragon", 10, ["the little", "dragon"]),
        ("the little\ndragon", 10, ["the little", "dragon"]),
        ("the little \ndragon", 10, ["the little", "dragon"]),
        ("see https://example.org/a/b now", 12, ["see", "https://exam", "ple.org/a/b", "now"]),
        ("日本語の文です", 6, ["日本語", "の文で", "す"]),
        ("日本語。文です", 6, ["日本", "語。文", "です"]),
        ("a family 👩\u200d👩\u200d👧!", 10, ["a family", "👩\u200d👩\u200d👧!"]),
        ("    two\tthree", 12, ["    two", "three"]),
    ],
)
def test_lines_end_where_a_reader_expects(text: str, columns: int, rows: list[str]) -> None:
    assert shown(text, columns) == rows
    assert shown(text, columns, list(range(len(text)))) == rows


def test_a_terminal_that_becomes_narrower_is_followed() -> None:
    words = WholeWords()
    assert words.fit("one two ", 80) == "one two "
    screen = Screen(12)
    screen.write("one two " + words.fit("three four", 12))
    assert screen.rows() == ["one two", "three four"]
