"""Suffix lookup: what followed the longest end of the text that has been seen before, here or in earlier texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from onward.sampling.params import check_whole
from onward.speculation.automaton import SuffixAutomaton
from onward.speculation.drafter import DraftRequest, DraftRow, continued

# A match of n ids is trusted with a draft of at most _TRUST * n.
_TRUST = 3


class SuffixLookup:
    """A `Drafter` that remembers: it looks in the prompt, in the output and in the outputs of earlier requests.

    Of the longest end of the text that occurs in the row's own text or in an earlier output it proposes what followed
    there, `_TRUST` ids for each that matched. Adding an id and finding the match cost O(1) amortised.
    (Oliaro et al., "SuffixDecoding", arXiv 2411.04975, with trees; automata here)

    shortest: the least ids that must match.
    max_tokens: of earlier outputs, how many ids are remembered at most, the latest; some 500 bytes each. 0 remembers
        none. A row's own prompt is indexed as far as its last `max_tokens` ids, or 4,096.
    """

    def __init__(self, shortest: int = 2, max_tokens: int = 32_768) -> None:
        check_whole("shortest", shortest, low=1)
        check_whole("max_tokens", max_tokens, low=0)
        self.shortest = shortest
        self.max_tokens = max_tokens
        self._earlier = _Earlier(max_tokens)
        self._running: list[_SuffixLookups] = []

    def start(self, request: DraftRequest) -> "_SuffixLookups":
        """Begin a request; what the requests before it have put out until now counts as earlier."""
        for running in self._running:
            for output in running.outputs.values():
                self._earlier.add(output)
        started = _SuffixLookups(self, self._earlier.automaton)
        self._running = [started] if self.max_tokens else []
        return started


class _Earlier:
    """Earlier outputs, one after another in one automaton; a negative id that occurs once parts them."""

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
        """Begin anew with the latest texts, of half the size: so an id is added twice at most on average."""
        kept: list[list[int]] = []
        room = self._max_tokens // 2
        for text in reversed(self._texts):
            if not kept or len(text) <= room:
                kept.append(text)
                room -= len(text)
            else:
                break
        self._texts = kept[::-1]
        self.automaton = SuffixAutomaton()
        for text in self._texts:
            self._append(text)

    def _append(self, text: Sequence[int]) -> None:
        for token in text:
            self.automaton.push(token)
        self.automaton.push(-1 - len(self.automaton))


@dataclass
class _Own:
    """A row: the automaton of its own text, and where its end is in that of earlier texts."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    taken: int = 0
    state: int = 0
    length: int = 0


class _SuffixLookups:
    """outputs: of each row that was asked for, the list that grows."""

    def __init__(self, lookup: SuffixLookup, earlier: SuffixAutomaton) -> None:
        self.outputs: dict[int, Sequence[int]] = {}
        self._shortest = lookup.shortest
        self._window = max(lookup.max_tokens, 4096)
        self._earlier = earlier
        self._rows: dict[int, _Own] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._continuation(row) for row in rows]

    def _continuation(self, row: DraftRow) -> list[int]:
        own = self._rows.get(row.owner)
        if own is None:
            own = self._rows[row.owner] = _Own(taken=max(0, len(row.prompt) - self._window))
            self.outputs[row.owner] = row.output
        for token in row.ids(own.taken):
            own.automaton.push(token)
            own.state, own.length = self._earlier.step(own.state, own.length, token)
        own.taken = len(row)
        here = own.automaton
        if max(here.length, own.length) < self._shortest:
            return []
        # The nearer text is the better guess where both match as far.
        if here.length >= own.length:
            return continued(here.ids, here.after(here.state), min(row.wanted, _TRUST * here.length))
        after = self._earlier.after(own.state)
        found = self._earlier.ids[after : after + min(row.wanted, _TRUST * own.length)]
        return found[: next((at for at, token in enumerate(found) if token < 0), len(found))]
