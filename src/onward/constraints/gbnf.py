"""GBNF, the grammar format of llama.cpp, read as an expression for each rule.

Differences: a rule may be left-recursive, alternatives may begin on the next line, and names may have underscores.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from onward.errors import OptionError

Ranges = tuple[tuple[int, int], ...]  # of code points, both inclusive, in order and apart

_LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
_MAX_DEPTH = 100  # of nested groups
_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_NAME, _NUMBER = re.compile(r"[A-Za-z0-9_-]+"), re.compile(r"[0-9]{1,9}")
_BLANKS, _SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")


class Expr:
    """An expression of a grammar. Equal only to itself, so that an occurrence is a key."""


@dataclass(eq=False)
class Chars(Expr):
    """One character of some ranges."""

    ranges: Ranges


@dataclass(eq=False)
class Sequence(Expr):
    items: list[Expr] = field(default_factory=list)


@dataclass(eq=False)
class Choice(Expr):
    items: list[Expr]


@dataclass(eq=False)
class Repeat(Expr):
    """An expression from `low` to `high` times; None: without end."""

    item: Expr
    low: int
    high: int | None


@dataclass(eq=False)
class Ref(Expr):
    """A rule. at: its place in the text."""

    name: str
    at: int


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF, which has a rule `root ::=`."""
    return _ROOT.search(text) is not None


def parsed(text: str) -> dict[str, Expr]:
    """The rules of a grammar. Raises `OptionError`, with line and column: it is not valid."""
    return _Parser(text).rules()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self._refs: list[Ref] = []

    def rules(self) -> dict[str, Expr]:
        rules: dict[str, Expr] = {}
        self._skip(_SPACE)
        while self._at < len(self._text):
            at, name = self._at, self._match(_NAME, "the name of a rule")
            self._skip(_BLANKS)
            self._expect("::=")
            if name in rules:
                self._fail(f"the rule {name!r} is defined twice", at)
            self._skip(_SPACE)
            rules[name] = self._choice()
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                self._fail("expected an expression or the end of the line")
            self._skip(_SPACE)
        for ref in self._refs:
            if ref.name not in rules:
                self._fail(f"no rule {ref.name!r}", ref.at)
        return rules

    def _choice(self) -> Expr:
        items = [self._sequence()]
        while self._next("|") or (not self._depth and self._continues()):
            self._expect("|")
            self._skip(_SPACE)
            items.append(self._sequence())
        return items[0] if len(items) == 1 else Choice(items)

    def _continues(self) -> bool:
        """Skip to a "|" on one of the next lines, if it comes first."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None, "it may be empty"
        if not self._text.startswith("|", space.end()):
            return False
        self._at = space.end()
        return True

    def _sequence(self) -> Expr:
        items: list[Expr] = []
        while (item := self._item()) is not None:
            self._skip(_SPACE if self._depth else _BLANKS)
            while (counts := self._counts()) is not None:
                item = Repeat(item, *counts)
                self._skip(_SPACE if self._depth else _BLANKS)
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(items)

    def _item(self) -> Expr | None:
        at = self._at
        if self._next('"'):
            self._at += 1
            literal: list[Expr] = [Chars(((point, point),)) for point in self._points()]
            return literal[0] if len(literal) == 1 else Sequence(literal)
        if self._next("["):
            return self._class()
        if self._next("."):
            self._at += 1
            return Chars(_without(()))
        if self._next("("):
            self._at += 1
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                self._fail(f"groups are nested more than {_MAX_DEPTH} deep", at)
            self._skip(_SPACE)
            inner = self._choice()
            self._skip(_SPACE)
            self._expect(")")
            self._depth -= 1
            return inner
        if self._next("<") or self._next("!"):
            self._fail("tokens in a grammar are not supported: write their text")
        if _NAME.match(self._text, at):
            self._refs.append(Ref(self._match(_NAME, "a name"), at))
            return self._refs[-1]
        return None

    def _counts(self) -> tuple[int, int | None] | None:
        at = self._at
        for mark, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._next(mark):
                self._at += 1
                return counts
        if not self._next("{"):
            return None
        self._at += 1
        self._skip(_SPACE)
        low = int(self._match(_NUMBER, "a number"))
        high: int | None = low
        self._skip(_SPACE)
        if self._next(","):
            self._at += 1
            self._skip(_SPACE)
            high = None if self._next("}") else int(self._match(_NUMBER, "a number"))
            self._skip(_SPACE)
        self._expect("}")
        if high is not None and high < low:
            self._fail(f"{{{low},{high}}} has its larger number first", at)
        return low, high

    def _class(self) -> Chars:
        at = self._at
        self._at += 1
        is_negated = self._next("^")
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while not self._next("]"):
            first = last = self._point("]")
            if self._next("-") and not self._text.startswith("]", self._at + 1):
                self._at += 1
                last = self._point("]")
            if last < first:
                self._fail(f"the range {chr(first)!r} to {chr(last)!r} is empty", at)
            ranges.append((first, last))
        self._at += 1
        merged = _merged(ranges)
        chosen = _without(merged) if is_negated else merged
        if not chosen:
            self._fail("the class has no characters", at)
        return Chars(chosen)

    def _points(self) -> Iterator[int]:
        """Of a literal, up to its closing quote."""
        while not self._next('"'):
            yield self._point('"')
        self._at += 1

    def _point(self, end: str) -> int:
        """The code point of a character or escape."""
        at, text = self._at, self._text
        if at >= len(text) or text[at] in "\r\n":
            self._fail(f"expected {end!r}")
        self._at += 1
        if text[at] != "\\":
            return ord(text[at])
        letter = text[at + 1 : at + 2]
        self._at += 1
        if letter in _DIGITS:
            digits = text[at + 2 : at + 2 + _DIGITS[letter]]
            self._at += len(digits)
            if len(digits) == _DIGITS[letter] and re.fullmatch("[0-9A-Fa-f]+", digits):
                point = int(digits, 16)
                if point <= _LAST and not _SURROGATES[0] <= point <= _SURROGATES[1]:
                    return point
            self._fail(f"\\{letter}{digits} is not a character", at)
        if not letter or letter not in _ESCAPES:
            self._fail(f"unknown escape \\{letter}", at)
        return ord(_ESCAPES[letter])

    def _next(self, mark: str) -> bool:
        return self._text.startswith(mark, self._at)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None, "it may be empty"
        self._at = match.end()

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            self._fail(f"expected {what}")
        self._at = match.end()
        return match[0]

    def _expect(self, mark: str) -> None:
        if not self._next(mark):
            self._fail(f"expected {mark!r}")
        self._at += len(mark)

    def _fail(self, problem: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        line, column = self._text.count("\n", 0, at) + 1, at - self._text.rfind("\n", 0, at)
        raise OptionError("grammar", f"is not valid GBNF at line {line}, column {column}: {problem}")


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def _without(ranges: Ranges) -> Ranges:
    """All other characters."""
    found, start = [], 0
    for first, last in _merged([*ranges, _SURROGATES]):
        if start < first:
            found.append((start, first - 1))
        start = last + 1
    if start <= _LAST:
        found.append((start, _LAST))
    return tuple(found)
