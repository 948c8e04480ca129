"""Suffix lookup: a drafter that copies what followed the text's longest end where it occurred before.

It looks in the text itself and in the outputs of earlier requests.
"""

import threading
import weakref
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
        self._lock = threading.Lock()  # requests of several threads may begin at once
        self._earlier = _Earlier(max_tokens)
        self._outputs: dict[int, _Output] = {}  # by the id of the list, of requests that may still go on
        renew_in_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy learns anew."""
        return type(self), (self.shortest, self.max_tokens)

    def start(self, request: DraftRequest) -> "_SuffixLookups":
        """Begin a request. The outputs of other requests as they are now count as earlier output."""
        with self._lock:
            for key, output in list(self._outputs.items()):
                is_over = output.drafting() is None  # asked first: what comes before the end is learnt
                self._earlier.learn(output)
                if is_over:
                    output.ids = ()  # the automaton has a copy
                    del self._outputs[key]
            return _SuffixLookups(self, self._earlier.automaton)

    def follow(self, output: Sequence[int], drafting: "_SuffixLookups") -> None:
        """Learn this list, which grows, as long as the request goes on. A preempted request begins twice."""
        if not self.max_tokens:
            return
        with self._lock:
            known = self._outputs.setdefault(id(output), _Output(output, weakref.ref(drafting)))
            known.drafting = weakref.ref(drafting)

    def renew(self) -> None:
        """In a forked child: a new lock. What another thread was adding to is forgotten."""
        if self._lock.locked():
            self._earlier, self._outputs = _Earlier(self.max_tokens), {}
        self._lock = threading.Lock()


@dataclass(eq=False)
class _Output:
    """The output of a row.

    ids: the list, which grows until the request is over. drafting: the request, which is not kept alive by this.
    learnt: how many of the ids have been learnt. text: which text of the automaton they are; None where it has none.
    """

    ids: Sequence[int]
    drafting: "weakref.ref[_SuffixLookups]"
    learnt: int = 0
    text: int | None = None


class _Earlier:
    """Outputs in one automaton. Each is one text of it, however many others grow at the same time."""

    def __init__(self, max_tokens: int) -> None:
        self.automaton = SuffixAutomaton()
        self._max_tokens = max_tokens
        self._learnt: dict[_Output, None] = {}  # those in the automaton; the one that grew last is last

    def learn(self, output: _Output) -> None:
        """Add the ids by which an output has grown."""
        ids = list(output.ids[output.learnt :])
        if not ids:
            return
        output.learnt += len(ids)
        ids = ids[-self._max_tokens :]
        if len(self.automaton) + len(ids) >= self._max_tokens:
            self._forget(min(self._max_tokens // 2, self._max_tokens - len(ids)))
        self._learnt.pop(output, None)
        self._learnt[output] = None
        self._append(output, ids)

    def _forget(self, room: int) -> None:
        """Begin a new automaton with the latest `room` ids, at most half of all, so that an id is added at most twice
        on average."""
        old, self.automaton = self.automaton, SuffixAutomaton()
        latest: list[tuple[_Output, list[int]]] = []
        for output in reversed(self._learnt):
            assert output.text is not None
            ids = old.text(output.text)[1:][-room:] if room > 0 else []
            room -= len(ids)
            latest.append((output, ids))
            output.text = None
        self._learnt = {}
        for output, ids in reversed(latest):
            if ids:
                self._learnt[output] = None
                self._append(output, ids)

    def _append(self, output: _Output, ids: Sequence[int]) -> None:
        if output.text is None:
            output.text = self.automaton.add_text()
        for token in ids:
            self.automaton.push(token, output.text)


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
    """The rows of one request."""

    def __init__(self, lookup: SuffixLookup, earlier: SuffixAutomaton) -> None:
        self._lookup = lookup
        self._window = max(lookup.max_tokens, 4096)
        self._earlier = earlier
        self._rows: dict[int, _RowIndex] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._continuation(row) for row in rows]

    def _continuation(self, row: DraftRow) -> list[int]:
        index = self._rows.get(row.owner)
        if index is None:
            index = self._rows[row.owner] = _RowIndex(indexed=max(0, len(row.prompt) - self._window))
            self._lookup.follow(row.output, self)
        own, earlier = index.automaton, self._earlier
        for token in row.ids(index.indexed):
            own.push(token)
            index.earlier_state, index.earlier_length = earlier.step(index.earlier_state, index.earlier_length, token)
        index.indexed = len(row)
        shortest = self._lookup.shortest
        # Where both match equally far, the row's own text is the better guess.
        if index.earlier_length >= max(shortest, own.length + 1):
            ids = earlier.following(index.earlier_state, min(row.wanted, _TRUST * index.earlier_length))
            if ids:  # none follow where the row has been learnt up to its end
                return ids
        if own.length < shortest:
            return []
        return continued(own.ids, own.after(own.state), min(row.wanted, _TRUST * own.length))
