"""Suffix lookup: a drafter that copies what followed the text's longest end where it occurred before.

It looks in the text itself and in the outputs of earlier requests.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onward.checks import check_whole
from onward.forks import renew_in_forks
from onward.speculation.automaton import SuffixAutomaton
from onward.speculation.drafter import DraftRequest, DraftRow, continued

# A match of n ids gives a draft of at most _TRUST * n ids.
_TRUST = 3


class SuffixLookup:
    """A `Drafter` that looks in the prompt, in the output and in the outputs of earlier requests.

    It finds the longest end of the text that occurs before in the row's own text or in an earlier output. It proposes
    what followed there, up to `_TRUST` ids for each id that matched. Adding an id and finding the match cost O(1)
    amortised. (Oliaro et al., "SuffixDecoding", arXiv 2411.04975, which uses trees; here they are automata)

    shortest: the fewest ids that must match.
    max_tokens: the most ids of earlier outputs that are remembered, the latest, which take some 500 bytes each;
        0 remembers none. Of a row's own prompt the last `max_tokens` ids are indexed, or 4,096 if that is more.
    """

    def __init__(self, shortest: int = 2, max_tokens: int = 32_768) -> None:
        check_whole("shortest", shortest, low=1)
        check_whole("max_tokens", max_tokens, low=0)
        self.shortest = shortest
        self.max_tokens = max_tokens
        self._lock = threading.Lock()  # of who adds: calls of several threads may begin at once
        self._earlier = _Earlier(max_tokens)
        self._running: list[_SuffixLookups] = []
        renew_in_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy learns anew."""
        return type(self), (self.shortest, self.max_tokens)

    def start(self, request: DraftRequest) -> "_SuffixLookups":
        """Begin a request. What earlier requests have put out until now counts as earlier output."""
        with self._lock:
            for running in self._running:
                for output in list(running.outputs.values()):  # another thread's request may still go on
                    self._earlier.add(output)
            started = _SuffixLookups(self, self._earlier.automaton)
            self._running = [started] if self.max_tokens else []
            return started

    def renew(self) -> None:
        """In a forked child: a new lock. What another thread was adding to is forgotten."""
        if self._lock.locked():
            self._earlier, self._running = _Earlier(self.max_tokens), []
        self._lock = threading.Lock()


class _Earlier:
    """Earlier outputs, one after another in one automaton. After each stands a negative id that occurs nowhere else."""

    def __init__(self, max_tokens: int) -> None:
        self.automaton = SuffixAutomaton()
        self._max_tokens = max_tokens
        self._texts: list[list[int]] = []

    def add(self, output: Sequence[int]) -> None:
        if not output:
            return
        self._texts.append(list(output[-self._max_tokens :]))
        if len(self.automaton) + len(output) >= self._max_tokens:
            self._forget()
        else:
            self._append(self._texts[-1])

    def _forget(self) -> None:
        """Begin a new automaton with the latest texts, of half the size. So an id is added at most twice on average."""
        latest: list[list[int]] = []
        room = self._max_tokens // 2
        for text in reversed(self._texts):
            if not latest or len(text) <= room:
                latest.append(text)
                room -= len(text)
            else:
                break
        self._texts = latest[::-1]
        self.automaton = SuffixAutomaton()
        for text in self._texts:
            self._append(text)

    def _append(self, text: Sequence[int]) -> None:
        for token in text:
            self.automaton.push(token)
        self.automaton.push(-1 - len(self.automaton))


@dataclass
class _RowIndex:
    """One row.

    automaton: of the row's own text. indexed: how many ids of the text it has, or skips.
    earlier_state, earlier_length: of the longest end of the text that occurs in the automaton of earlier outputs.
    """

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    indexed: int = 0
    earlier_state: int = 0
    earlier_length: int = 0


class _SuffixLookups:
    """The rows of one request. outputs: by owner, the output of each row that was asked for; the list grows."""

    def __init__(self, lookup: SuffixLookup, earlier: SuffixAutomaton) -> None:
        self.outputs: dict[int, Sequence[int]] = {}
        self._shortest = lookup.shortest
        self._window = max(lookup.max_tokens, 4096)
        self._earlier = earlier
        self._rows: dict[int, _RowIndex] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._continuation(row) for row in rows]

    def _continuation(self, row: DraftRow) -> list[int]:
        index = self._rows.get(row.owner)
        if index is None:
            index = self._rows[row.owner] = _RowIndex(indexed=max(0, len(row.prompt) - self._window))
            self.outputs[row.owner] = row.output
        own, earlier = index.automaton, self._earlier
        for token in row.ids(index.indexed):
            own.push(token)
            index.earlier_state, index.earlier_length = earlier.step(index.earlier_state, index.earlier_length, token)
        index.indexed = len(row)
        if max(own.length, index.earlier_length) < self._shortest:
            return []
        # Where both match equally far, the row's own text is the better guess.
        if own.length >= index.earlier_length:
            return continued(own.ids, own.after(own.state), min(row.wanted, _TRUST * own.length))
        after = earlier.after(index.earlier_state)
        ids = earlier.ids[after : after + min(row.wanted, _TRUST * index.earlier_length)]
        return ids[: next((end for end, token in enumerate(ids) if token < 0), len(ids))]
