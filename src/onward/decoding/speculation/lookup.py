"""Drafters that copy: what followed the last ids earlier in the text, or in other outputs; or a predicted output."""

import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from onward.decoding.speculation.drafter import DraftRow, DraftTarget, continued
from onward.errors import RequestError
from onward.util.checks import check_whole
from onward.util.process import renew_in_forks

# The most earlier occurrences to compare, latest first.
_CANDIDATES = 32


class PromptLookup:
    """A `Drafter` that looks up the last ids earlier in the sequence and proposes what followed.

    It compares the earlier occurrences of the last `shortest` ids and takes the one with the longest match, up to
    `longest` ids, or the latest of equals. This costs a few microseconds per token.
    (A. Saxena, "Prompt lookup decoding", 2023; J. Yang et al., "Inference with reference", arXiv 2304.04487)

    Raises:
        RequestError: unless 1 <= shortest <= longest.
    """

    def __init__(self, shortest: int = 2, longest: int = 8) -> None:
        if not 1 <= shortest <= longest:
            raise RequestError(f"PromptLookup needs 1 <= shortest <= longest; got {shortest} and {longest}")
        self.shortest = shortest
        self.longest = longest

    def start(self, target: DraftTarget) -> Self:
        return self

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._continuation(row) for row in rows]

    def _continuation(self, row: DraftRow) -> list[int]:
        if row.state is None:
            row.state = _Index()
        index, shortest = row.state, self.shortest
        ids = index.ids
        ids += row.ids(len(ids))
        # The run at the end itself is not indexed, because nothing follows it yet.
        for after in range(max(index.indexed, shortest), len(ids)):
            index.after.setdefault(tuple(ids[after - shortest : after]), []).append(after)
        index.indexed = max(index.indexed, len(ids))
        start = self._after_longest_match(ids, index.after.get(tuple(ids[len(ids) - shortest :]), ()))
        return [] if start is None else continued(ids, start, row.limit)

    def _after_longest_match(self, ids: Sequence[int], positions: Sequence[int]) -> int | None:
        best, length = None, 0
        for after in positions[: -_CANDIDATES - 1 : -1]:
            agreeing = self.shortest
            while agreeing < min(self.longest, after) and ids[after - agreeing - 1] == ids[len(ids) - agreeing - 1]:
                agreeing += 1
            if agreeing > length:
                best, length = after, agreeing
            if length == self.longest:
                break
        return best


@dataclass
class _Index:
    """The ids of a row. after: for each run of `shortest` ids, the positions after its occurrences, in order."""

    ids: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    indexed: int = 0  # `after` has the runs that end before this position


# How many of the last ids must match the prediction to resume it after a difference.
_AGREEING = 3


class PredictedOutput:
    """A `Drafter` that proposes a predicted output, such as a file to be edited in a few places.

    After a difference it resumes behind the next place in the prediction that matches the last three ids, preferably
    after the previous place.

    ids: of the prediction, which is for one request.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self._after: dict[tuple[int, ...], list[int]] = {}
        for end in range(_AGREEING, len(self.ids)):
            self._after.setdefault(self.ids[end - _AGREEING : end], []).append(end)

    def start(self, target: DraftTarget) -> Self:
        return self

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        return [self._continuation(row) for row in rows]

    def _continuation(self, row: DraftRow) -> Sequence[int]:
        if row.state is None:
            row.state = _Place()
        ids, place = self.ids, row.state
        for seen in range(place.seen, len(row.output)):
            if place.at is not None and place.at < len(ids) and ids[place.at] == row.output[seen]:
                place.at += 1
            else:
                last = row.output[max(0, seen + 1 - _AGREEING) : seen + 1]
                places = self._after.get(tuple(last), ())
                place.at = next((at for at in places if at >= place.last), places[0] if places else None)
            place.last = place.last if place.at is None else place.at
        place.seen = len(row.output)
        return () if place.at is None else ids[place.at : place.at + row.limit]


@dataclass
class _Place:
    """A row's place in the prediction. at: the index of the next id; None while they differ."""

    at: int | None = 0
    last: int = 0  # the last `at` that was not None
    seen: int = 0  # the number of output ids compared so far


# The lower bits are the position in a sequence, the others are the index of the sequence.
_POSITION_BITS = 32
_POSITION = (1 << _POSITION_BITS) - 1


class SuffixAutomaton:
    """A suffix automaton of growing texts: every run of ids, with the position after one occurrence.

    It starts with text 0. More texts can be added, and each can grow at any time.

    A state stands for all runs that end at the same positions. Adding an id costs O(1) amortised while one text grows.
    The automaton has at most two states and three transitions per id. (Blumer et al., "The smallest automaton
    recognizing the subwords of a text", Theoretical Computer Science 40, 1985)

    ids: text 0. state, length: of the longest repeated suffix of text 0; 0 and 0 if there is none.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._texts = [self.ids]
        self._lasts = array("q", [0])  # for each text, the state of the whole text
        self._next: list[dict[int, int]] = [{}]
        self._link = array("q", [-1])
        self._length = array("q", [0])
        self._after = array("q", [0])
        self._size = 0

    def __len__(self) -> int:
        """The number of ids in all texts."""
        return self._size

    @property
    def state(self) -> int:
        return self._repeated(0)

    @property
    def length(self) -> int:
        return self._length[self.state]

    def after(self, state: int) -> int:
        """The position in text 0 after an occurrence of the state's runs: the latest at which they were the longest
        repeated suffix, or else the first."""
        return self._after[state] & _POSITION

    def following(self, state: int, count: int) -> list[int]:
        """Up to `count` ids that follow an occurrence of the state's runs in its text."""
        after = self._after[state]
        position = after & _POSITION
        return self._texts[after >> _POSITION_BITS][position : position + count]

    def text(self, text: int) -> list[int]:
        """The ids of a text; an added text begins with its marker."""
        return self._texts[text]

    def add_text(self) -> int:
        """Add a text and return its index. It begins with a unique negative id, so the state of the whole text is never
        that of another run."""
        self._texts.append([])
        self._lasts.append(0)
        text = len(self._texts) - 1
        self.push(-text, text)
        return text

    def push(self, token: int, text: int = 0) -> None:
        """Append an id to a text."""
        ids, suffix = self._texts[text], self._lasts[text]
        # The occurrence that ended here is now an earlier one.
        self._after[self._repeated(text)] = text << _POSITION_BITS | len(ids)
        ids.append(token)
        self._size += 1
        new = self._new_state({}, self._length[suffix] + 1, text << _POSITION_BITS | len(ids))
        while suffix >= 0 and token not in self._next[suffix]:
            self._next[suffix][token] = new
            suffix = self._link[suffix]
        self._link[new] = 0 if suffix < 0 else self._split(suffix, token)
        self._lasts[text] = new

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Advance the state and length of another text's longest suffix that occurs here by one id."""
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = min(length, self._length[state])  # a state may have been split since
        following = self._next[state].get(token)
        return (0, 0) if following is None else (following, length + 1)

    def _repeated(self, text: int) -> int:
        """The state of the longest suffix of a text that also occurs elsewhere."""
        return max(self._link[self._lasts[text]], 0)

    def _split(self, state: int, token: int) -> int:
        """The state whose longest run is that of `state` followed by `token`, cloned if necessary."""
        following = self._next[state][token]
        if self._length[following] == self._length[state] + 1:
            return following
        clone = self._new_state(dict(self._next[following]), self._length[state] + 1, self._after[following])
        self._link[clone] = self._link[following]
        self._link[following] = clone
        while state >= 0 and self._next[state].get(token) == following:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _new_state(self, transitions: dict[int, int], length: int, after: int) -> int:
        self._next.append(transitions)
        self._link.append(0)
        self._length.append(length)
        self._after.append(after)
        return len(self._next) - 1


# A match of n ids gives a draft of at most _TRUST * n ids.
_TRUST = 3
# The most salts whose outputs are remembered.
_MAX_SALTS = 8


class SuffixLookup:
    """A `Drafter` that searches the prompt, the output and the outputs of earlier requests.

    It finds the longest suffix that occurs earlier in the row or in an earlier output, and proposes what followed,
    up to `_TRUST` ids per matched id. Adding an id and finding the match cost O(1) amortised. (Oliaro et al.,
    "SuffixDecoding", arXiv 2411.04975, with automata instead of trees)

    shortest: the fewest ids that must match.
    max_tokens: how many of the latest output ids are remembered, at about 500 bytes each; 0 remembers none. This is for
        each of the last eight salts, since a row only copies from rows with its salt. The last `max_tokens` ids of a
        row's own prompt are indexed, but at least 4,096.
    """

    def __init__(self, shortest: int = 2, max_tokens: int = 32_768) -> None:
        check_whole("shortest", shortest, low=1)
        check_whole("max_tokens", max_tokens, low=0)
        self.shortest = shortest
        self.max_tokens = max_tokens
        self._lock = threading.Lock()  # requests of several threads may begin at once
        self._earlier: OrderedDict[str | None, _Earlier] = OrderedDict()  # by salt, the last used ones last
        self._outputs: list[_Output] = []  # of rows that may still run
        renew_in_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy remembers nothing."""
        return type(self), (self.shortest, self.max_tokens)

    def start(self, target: DraftTarget) -> Self:
        return self

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._continuation(row) for row in rows]

    def _continuation(self, row: DraftRow) -> list[int]:
        if row.state is None:
            row.state = self._begin(row)
        index = row.state
        own, earlier = index.automaton, index.earlier
        for token in row.ids(index.indexed):
            own.push(token)
            index.earlier_state, index.earlier_length = earlier.step(index.earlier_state, index.earlier_length, token)
        index.indexed = len(row)
        # For equal matches, the row's own ids are the better guess.
        if index.earlier_length >= max(self.shortest, own.length + 1):
            ids: list[int] = earlier.following(index.earlier_state, min(row.limit, _TRUST * index.earlier_length))
            if ids:  # none follow if the row has been learnt up to its end
                return ids
        if own.length < self.shortest:
            return []
        return continued(own.ids, own.after(own.state), min(row.limit, _TRUST * own.length))

    def _begin(self, row: DraftRow) -> "_SuffixIndex":
        """The index of a new row. The outputs of other rows so far count as earlier outputs, and its own is learnt from
        now on."""
        with self._lock:
            running = []
            for output in self._outputs:
                is_over = output.row() is None  # checked first, so that all ids before the end are learnt
                if output.learnt < len(output.ids):
                    self._outputs_of(output.salt).learn(output)
                if is_over:
                    output.ids = ()  # the automaton has a copy
                else:
                    running.append(output)
            if self.max_tokens:
                running.append(_Output(row.output, weakref.ref(row), row.salt))
            self._outputs = running
            earlier = self._outputs_of(row.salt).automaton
            return _SuffixIndex(earlier, max(0, len(row.prompt) - max(self.max_tokens, 4096)))

    def _outputs_of(self, salt: str | None) -> "_Earlier":
        if salt not in self._earlier:
            self._earlier[salt] = _Earlier(self.max_tokens)
        self._earlier.move_to_end(salt)
        if len(self._earlier) > _MAX_SALTS:
            self._earlier.popitem(last=False)[1].forget(0)
        return self._earlier[salt]

    def renew(self) -> None:
        """In a forked child: a new lock, and a new automaton if another thread was changing it."""
        if self._lock.locked():
            self._earlier, self._outputs = OrderedDict(), []
        self._lock = threading.Lock()


@dataclass
class _SuffixIndex:
    """earlier: the automaton of earlier outputs; earlier_state, earlier_length: of the row's longest suffix there.
    indexed: how many of the row's ids its own automaton has, or skips."""

    earlier: SuffixAutomaton
    indexed: int
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    earlier_state: int = 0
    earlier_length: int = 0


@dataclass(eq=False)
class _Output:
    """A row's growing output. learnt: how many of its ids are in the automaton. text: their text there, if any."""

    ids: Sequence[int]
    row: "weakref.ref[DraftRow]"
    salt: str | None
    learnt: int = 0
    text: int | None = None


class _Earlier:
    """Earlier outputs in one automaton, each as one text of it."""

    def __init__(self, max_tokens: int) -> None:
        self.automaton = SuffixAutomaton()
        self._max_tokens = max_tokens
        self._learnt: dict[_Output, None] = {}  # outputs in the automaton, ordered by their last growth

    def learn(self, output: _Output) -> None:
        """Add the new ids of an output."""
        ids = list(output.ids[output.learnt :])
        output.learnt += len(ids)
        ids = ids[-self._max_tokens :]
        if len(self.automaton) + len(ids) >= self._max_tokens:
            self.forget(min(self._max_tokens // 2, self._max_tokens - len(ids)))
        self._learnt.pop(output, None)
        self._learnt[output] = None
        self._append(output, ids)

    def forget(self, room: int) -> None:
        """Rebuild the automaton with the latest `room` ids, at most half of all, so that an id is added twice at most
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
