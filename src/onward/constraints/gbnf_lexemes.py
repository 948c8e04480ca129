"""Translation of GBNF to llguidance's variant of Lark, for exactly the same texts.

llguidance splits a text into lexemes, each the longest that the parser allows at its place, and never reconsiders. GBNF
has no lexemes. With one for each character the result would be exact, but parsing a large vocabulary would be slow. So
the largest parts without recursion become lexemes, as long as the longest match is always right: if the character c
may follow a word of the lexeme X, no lexeme continues that word with c. A part that violates this is split into its own
parts, down to characters if necessary.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby

from onward.constraints.gbnf import Chars, Choice, Expr, Ref, Repeat, Sequence, parsed
from onward.schemas import lark_string

# Positions of a lexeme, steps of a search for conflicts, and searches; beyond them lexemes are single characters.
_MAX_POSITIONS, _MAX_STEPS, _MAX_SEARCHES = 4096, 200_000, 100


@lru_cache(maxsize=64)
def lark_of_gbnf(text: str) -> str:
    """The same grammar in Lark's syntax. Raises `OptionError`: it is not valid."""
    rules = parsed(text)
    return _Translation(rules).text()


class _TooLargeError(Exception):
    pass


class Automaton:
    """The words of an expression without recursion (Glushkov's construction): a position for each character, with the
    set of characters that it may be, as bits. Counts are left out, so it may have more words."""

    def __init__(self, expr: Expr, translation: "_Translation") -> None:
        self._translation, self._whole = translation, expr
        self.bits: list[int] = []
        self.next: list[set[int]] = []
        self.begins: list[int] = []  # the first position of each item of a sequence
        self.nullable, self.first, last = self._add(expr)
        self.last = frozenset(last)

    def _add(self, expr: Expr) -> tuple[bool, frozenset[int], frozenset[int]]:
        if isinstance(expr, Chars):
            if len(self.bits) >= _MAX_POSITIONS:
                raise _TooLargeError
            self.bits.append(self._translation.bits(expr))
            self.next.append(set())
            only = frozenset([len(self.bits) - 1])
            return False, only, only
        if isinstance(expr, Ref):
            return self._add(self._translation.rules[expr.name])
        nothing: frozenset[int] = frozenset()
        if isinstance(expr, Repeat):
            nullable, first, last = self._add(expr.item)
            if expr.high == 0:
                return True, nothing, nothing
            self._link(last, first)
            return nullable or expr.low == 0, first, last
        assert isinstance(expr, Choice | Sequence)
        if isinstance(expr, Choice):
            parts = [self._add(item) for item in expr.items]
            firsts, lasts = nothing.union(*(part[1] for part in parts)), nothing.union(*(part[2] for part in parts))
            return any(part[0] for part in parts), firsts, lasts
        nullable, first, last = True, nothing, nothing
        for item in expr.items:
            if expr is self._whole:
                self.begins.append(len(self.bits))
            item_nullable, item_first, item_last = self._add(item)
            self._link(last, item_first)
            first = first | item_first if nullable else first
            last = last | item_last if item_nullable else item_last
            nullable = nullable and item_nullable
        return nullable, first, last

    def _link(self, before: frozenset[int], after: frozenset[int]) -> None:
        for position in before:
            self.next[position] |= after


class _Translation:
    def __init__(self, rules: Mapping[str, Expr]) -> None:
        self.rules = rules
        self._recursive = _recursive(rules)
        edges = sorted({edge for each in _walk(*rules.values()) if isinstance(each, Chars) for edge in _edges(each)})
        self._numbers = {edge: number for number, edge in enumerate(edges)}
        self._cut: dict[Expr, int] = {}  # what is no lexeme; the item at which a sequence is split
        self._cuts_all = False
        self._runs: dict[tuple[Expr, int], Sequence] = {}  # by the first item, and the number of items
        self._automata: dict[Expr, Automaton] = {}
        self._nullable, self._first = self._starts()

    def bits(self, chars: Chars) -> int:
        """A bit for each stretch of code points between two neighbouring edges of all classes."""
        found = 0
        for first, last in chars.ranges:
            found |= (1 << self._numbers[last + 1]) - (1 << self._numbers[first])
        return found

    def text(self) -> str:
        try:
            for _ in range(_MAX_SEARCHES):
                if not (cut := dict(self._conflicts())):
                    break
                self._cut |= cut
            else:
                self._cuts_all = True
        except _TooLargeError:
            self._cuts_all = True
        return _Writer(self).text()

    def is_lexeme(self, expr: Expr) -> bool:
        if isinstance(expr, Chars):
            return True
        return not self._cuts_all and expr not in self._cut and self.is_regular(expr)

    def is_regular(self, expr: Expr) -> bool:
        return not any(isinstance(each, Ref) and each.name in self._recursive for each in _walk(expr))

    def parts(self, sequence: Sequence) -> list[Expr]:
        """The items of a sequence, with runs of those without recursion as one; or its two halves if it is split."""
        items = sequence.items
        if self._cuts_all:
            return items
        if sequence in self._cut:
            at = self._cut[sequence]
            return [self._run(half) for half in (items[:at], items[at:])]
        groups = groupby(items, self.is_regular)
        return [part for regular, each in groups for part in ([self._run(list(each))] if regular else each)]

    def _run(self, items: list[Expr]) -> Expr:
        if len(items) == 1:
            return items[0]
        return self._runs.setdefault((items[0], len(items)), Sequence(items))

    def children(self, expr: Expr) -> list[Expr]:
        if isinstance(expr, Sequence):
            return self.parts(expr)
        return expr.items if isinstance(expr, Choice) else [expr.item] if isinstance(expr, Repeat) else []

    def automaton(self, expr: Expr) -> Automaton:
        if expr not in self._automata:
            self._automata[expr] = Automaton(expr, self)
        return self._automata[expr]

    def nullable(self, expr: Expr) -> bool:
        if isinstance(expr, Chars | Ref):
            return isinstance(expr, Ref) and self._nullable[expr.name]
        if isinstance(expr, Repeat):
            return expr.low == 0 or self.nullable(expr.item)
        assert isinstance(expr, Choice | Sequence)
        return (any if isinstance(expr, Choice) else all)(self.nullable(item) for item in expr.items)

    def first(self, expr: Expr) -> int:
        """The characters that a text may begin with, as bits."""
        if isinstance(expr, Chars):
            return self.bits(expr)
        if isinstance(expr, Ref):
            return self._first[expr.name]
        if isinstance(expr, Repeat):
            return self.first(expr.item) if expr.high != 0 else 0
        assert isinstance(expr, Choice | Sequence)
        found = 0
        for item in expr.items:
            found |= self.first(item)
            if isinstance(expr, Sequence) and not self.nullable(item):
                break
        return found

    def _starts(self) -> tuple[dict[str, bool], dict[str, int]]:
        self._nullable, self._first = dict.fromkeys(self.rules, False), dict.fromkeys(self.rules, 0)
        while True:
            nullable = {name: self.nullable(expr) for name, expr in self.rules.items()}
            first = {name: self.first(expr) for name, expr in self.rules.items()}
            if (nullable, first) == (self._nullable, self._first):
                return nullable, first
            self._nullable, self._first = nullable, first

    def _follows(self) -> dict[Expr, int]:
        """The lexemes, and the characters that may follow each, as bits."""
        lexemes: dict[Expr, int] = {}
        of_rules = {"root": 0}
        changed = deque(["root"])
        while changed:
            name = changed.popleft()
            stack = [(self.rules[name], of_rules[name])]
            while stack:
                expr, after = stack.pop()
                if self.is_lexeme(expr):
                    lexemes[expr] = lexemes.get(expr, 0) | after
                elif isinstance(expr, Ref):
                    before = of_rules.get(expr.name)
                    of_rules[expr.name] = after | (before or 0)
                    if of_rules[expr.name] != before:
                        changed.append(expr.name)
                elif isinstance(expr, Repeat):
                    again = expr.high is None or expr.high > 1
                    stack.append((expr.item, after | self.first(expr.item) if again else after))
                elif isinstance(expr, Choice):
                    stack += [(item, after) for item in expr.items]
                else:
                    for item in reversed(self.children(expr)):
                        stack.append((item, after))
                        after = self.first(item) | (after if self.nullable(item) else 0)
        return lexemes

    def _conflicts(self) -> Iterator[tuple[Expr, int]]:
        """Lexemes to split: those that go on from a word of a lexeme with a character that may follow the word. With
        the item of a sequence before which to split it: the one that goes on."""
        follows, steps = self._follows(), 0
        starts = [(other, position) for other in follows for position in self.automaton(other).first]
        for expr, follow in follows.items():
            automaton = self.automaton(expr)
            seen = {
                (mine, other, theirs)
                for mine in automaton.first
                for other, theirs in starts
                if automaton.bits[mine] & self.automaton(other).bits[theirs]
            }
            steps += len(seen) + len(starts) * len(automaton.first)
            stack = list(seen)
            while stack:
                mine, other, theirs = stack.pop()
                theirs_of = self.automaton(other)
                for after in theirs_of.next[theirs]:
                    if mine in automaton.last and theirs_of.bits[after] & follow:
                        yield other, max(1, bisect_right(theirs_of.begins, after) - 1)
                    for ours in automaton.next[mine]:
                        pair = (ours, other, after)
                        steps += 1
                        if automaton.bits[ours] & theirs_of.bits[after] and pair not in seen:
                            seen.add(pair)
                            stack.append(pair)
                if steps > _MAX_STEPS:
                    raise _TooLargeError


class _Writer:
    """Writes a translation in Lark's syntax."""

    def __init__(self, translation: _Translation) -> None:
        self._translation = translation
        self._names: dict[str, str] = {}  # of rules and of terminals, by the name in GBNF with a prefix
        self._lexemes: dict[str, str] = {}  # the names of lexemes by their text
        self._lines: list[str] = []
        self._pending: deque[str] = deque(["root"])

    def text(self) -> str:
        done = set()
        while self._pending:
            if (name := self._pending.popleft()) not in done:
                done.add(name)
                symbol = "start" if name == "root" else self._rule(name)
                self._lines.append(f"{symbol}: {self._of_rule(self._translation.rules[name])}")
        return "\n".join([*self._lines, *(f"{name}: {text}" for text, name in self._lexemes.items())])

    def _rule(self, name: str) -> str:
        if name == "root":
            return "start"
        return self._names.setdefault(f"rule {name}", f"r{len(self._names)}")

    def _of_rule(self, expr: Expr) -> str:
        translation = self._translation
        if translation.is_lexeme(expr):
            return self._lexeme(expr)
        if isinstance(expr, Ref):
            self._pending.append(expr.name)
            return self._rule(expr.name)
        return _joined(expr, [self._of_rule(each) for each in translation.children(expr)])

    def _lexeme(self, expr: Expr) -> str:
        if isinstance(expr, Chars):
            return self._lexemes.setdefault(_pattern(expr), f"T{len(self._lexemes)}")
        automaton = self._translation.automaton(expr)
        if not automaton.first:
            return '""'
        text = self._of_terminal(expr)
        if automaton.nullable:  # a lexeme has characters
            text = f"{text} & /(?s:.+)/"
        name = self._lexemes.setdefault(text, f"T{len(self._lexemes)}")
        return f"{name}?" if automaton.nullable else name

    def _of_terminal(self, expr: Expr) -> str:
        if isinstance(expr, Chars):
            return _pattern(expr)
        if isinstance(expr, Ref):
            return self._of_terminal(self._translation.rules[expr.name])
        if isinstance(expr, Sequence) and expr.items and all(map(_is_one_character, expr.items)):
            return lark_string("".join(chr(item.ranges[0][0]) for item in expr.items if isinstance(item, Chars)))
        items = [expr.item] if isinstance(expr, Repeat) else expr.items if isinstance(expr, Choice | Sequence) else []
        return _joined(expr, [self._of_terminal(item) for item in items])


def _joined(expr: Expr, items: list[str]) -> str:
    if isinstance(expr, Repeat):
        short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((expr.low, expr.high))
        counts = f"{{{expr.low},{'' if expr.high is None else expr.high}}}"
        return f"({items[0]}){short or counts}"
    if not items:
        return '""'
    return f"({' | '.join(items)})" if isinstance(expr, Choice) else f"({' '.join(items)})"


def _is_one_character(expr: Expr) -> bool:
    return isinstance(expr, Chars) and len(expr.ranges) == 1 and expr.ranges[0][0] == expr.ranges[0][1]


def _pattern(chars: Chars) -> str:
    ranges = "".join(
        f"\\x{{{first:x}}}" if first == last else f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in chars.ranges
    )
    return f"/[{ranges}]/"


def _edges(chars: Chars) -> Iterator[int]:
    for first, last in chars.ranges:
        yield first
        yield last + 1


def _walk(*exprs: Expr) -> Iterator[Expr]:
    """The expressions and all their parts, without those of the rules that they refer to."""
    stack = list(exprs)
    while stack:
        expr = stack.pop()
        yield expr
        if isinstance(expr, Repeat):
            stack.append(expr.item)
        elif isinstance(expr, Choice | Sequence):
            stack += expr.items


def _recursive(rules: Mapping[str, Expr]) -> set[str]:
    """The rules that refer to themselves, directly or through others, or to such a rule."""
    left = {name: {each.name for each in _walk(expr) if isinstance(each, Ref)} for name, expr in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in left.items():
        for other in used:
            users[other].append(name)
    ready = [name for name, used in left.items() if not used]
    recursive = set(rules)
    while ready:  # those that refer only to rules that do not
        name = ready.pop()
        recursive.discard(name)
        for user in users[name]:
            left[user].discard(name)
            if not left[user]:
                ready.append(user)
    return recursive
