"""How many ids to draft: what is accepted against what it costs, both measured while decoding.

Times decide here and nowhere else, and only how much is drafted: never which ids come out of the coupled verifier.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# Lengths of drafts, few, for each is a shape of its own to run the model with.
LENGTHS = (1, 2, 3, 4, 6, 8, 11, 15)
# What drafting may lose, of all time: probes are paid from this.
_BUDGET = 0.01
# What it must promise to be done for gain.
_MARGIN = 1.05
# Credit earned by drafts that paid is kept up to so many plain steps; then a change for the worse is noticed soon.
_MOST_CREDIT = 8.0
# After so many rounds without a plain step its cost is measured again, unless drafting is far ahead.
_STALE, _FAR_AHEAD = 32, 1.5
# The most choices between two probes.
_LONGEST_PATIENCE = 64
# The most steps for which nothing is asked of the pace: what it would say is known, and asking costs time too.
_LONGEST_REST = 128
# A step of a new shape that takes so many plain ones has had a program made for it: not what it costs from then on.
_MADE_A_PROGRAM = 3.0


class Acceptance:
    """How likely the next drafted id is to be accepted: a mean of outcomes that forgets old ones.

    rate: to begin with, worth as much as `_WEIGHT` outcomes.
    """

    _WEIGHT = 4.0
    _KEPT = 0.92  # of the past's weight, at each outcome

    def __init__(self, rate: float = 0.7) -> None:
        self._accepted = rate * self._WEIGHT
        self._tried = self._WEIGHT

    @property
    def rate(self) -> float:
        return self._accepted / self._tried

    def note(self, drafted: int, accepted: int) -> None:
        """Of `drafted` ids the first `accepted` were; those after the first that was not say nothing."""
        for outcome in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._accepted = self._KEPT * self._accepted + outcome
            self._tried = self._KEPT * self._tried + 1.0


def expected_tokens(rate: float, length: int) -> float:
    """Ids that a round emits with a draft of this length: the accepted ones and the target's own."""
    return length + 1.0 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)


class RowPace(NamedTuple):
    """rate: its acceptance. most: ids that a draft of it can have."""

    rate: float
    most: int


class Pace:
    """Chooses the lengths of drafts for one model. What it learns is kept from request to request.

    Drafting is done where it promises more ids a second than plain decoding does, and where its loss, should nothing
    be accepted, is covered: by what earlier drafts have gained, and by 1 % of all time spent so far. Where it
    promises nothing, it is tried again now and then, ever more rarely, from the same account. So all in all drafting
    takes no more than that 1 % from anybody, but for errors of measurement, and for what is paid once: programs for
    new shapes and the draft model's prompt.

    rest: so many steps to come are plain ones in any case. Their time is for `note_time`.
    """

    def __init__(self) -> None:
        self._costs: dict[int, _Costs] = {}
        self._credit = 0.0
        self._since_probe = 0
        self._patience = 1
        self._probing = False
        self.rest = 0

    def choose(self, rows: Sequence[RowPace], longest: int) -> int:
        """Ids to draft for each row of a batch, `longest` at most; 0 for a plain step."""
        costs = self._of(len(rows))
        self._probing = False
        self._since_probe += 1
        if costs.plain.count == 0:
            return 0
        lengths = [length for length in LENGTHS if length <= min(longest, costs.reach)]
        # Drafts of any length, were they free, would bring no more than this.
        bound = sum(expected_tokens(row.rate, longest) for row in rows) / len(rows)
        gains = {n: costs.gain(n, rows) for n in lengths} if bound > _MARGIN else {}
        best = max(gains.values(), default=0.0)
        if best > _MARGIN:
            self._patience = 1
            if costs.rounds_since_plain >= _STALE and best < _FAR_AHEAD:
                return 0
            return self._affordable([n for n in lengths if gains[n] > _MARGIN], gains, costs)
        if self._since_probe < self._patience:
            self.rest = min(self._patience - self._since_probe, _LONGEST_REST)
            return 0
        self._probing = True
        hopeful = [RowPace(max(row.rate, 0.5), row.most) for row in rows]
        return self._affordable(lengths, {n: costs.gain(n, hopeful) for n in lengths}, costs)

    def _affordable(self, lengths: Sequence[int], gains: Mapping[int, float], costs: "_Costs") -> int:
        """The length of most gain among those whose loss is covered, should nothing be accepted; 0 for none."""
        loss = {n: costs.round(n) - costs.plain.value for n in lengths}
        covered = [n for n in lengths if loss[n] <= self._credit]
        if covered:
            return max(covered, key=gains.__getitem__)
        missing = min(loss.values(), default=0.0) - self._credit
        self.rest = min(int(missing / (_BUDGET * costs.plain.value)), _LONGEST_REST)
        return 0

    def note_time(self, seconds: float) -> None:
        """Time that was spent on something else: a prompt, or a plain step while it rests."""
        self._credit += _BUDGET * seconds
        if self.rest:
            self.rest -= 1
            self._since_probe += 1

    def note_plain(self, rows: int, seconds: float, *, drafting: float = 0.0, new: bool = False) -> None:
        """A plain step; `drafting` of its seconds went to asking, and to a drafter that had nothing to propose. new: of
        a shape for which a program may have been made."""
        self._credit += _BUDGET * seconds - drafting
        costs = self._of(rows)
        costs.rounds_since_plain = 0
        if self._probing:
            self._since_probe = 0
        if not (new and (costs.plain.count == 0 or seconds > _MADE_A_PROGRAM * costs.plain.value)):
            costs.plain.add(seconds - drafting)

    def note_round(self, rows: int, length: int, emitted: int, seconds: float, *, new: bool = False) -> None:
        """A round with drafts of up to `length` that emitted so many ids in all."""
        costs = self._of(rows)
        costs.rounds_since_plain += 1
        if self._probing:
            self._since_probe = 0
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        made = new and seconds > _MADE_A_PROGRAM * costs.plain.value
        if not made:
            costs.rounds.setdefault(length, _Mean()).add(seconds)
        if costs.plain.count == 0:
            return
        spent = costs.round(length) if made else seconds
        gained = costs.plain.value * emitted / rows - spent
        self._credit = min(self._credit + _BUDGET * seconds + gained, _MOST_CREDIT * costs.plain.value)

    def _of(self, rows: int) -> "_Costs":
        costs = self._costs.get(rows)
        if costs is None:
            known = [other for other, found in self._costs.items() if found.plain.count]
            nearest = min(known, key=lambda other: abs(other - rows), default=None)
            costs = self._costs[rows] = _Costs() if nearest is None else self._costs[nearest].copy()
        return costs


class _Mean:
    """Of the first few values plain, then weighted to the latest; a single outlier moves it little."""

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value, self.count = value, count

    def add(self, value: float) -> None:
        self.count += 1
        if self.count > 1:
            value = min(value, 2 * self.value)
        self.value += max(1 / self.count, 0.2) * (value - self.value)


class _Costs:
    """Seconds of a step for a batch of one size: plain, and whole rounds by the length of the draft."""

    def __init__(self) -> None:
        self.plain = _Mean()
        self.rounds: dict[int, _Mean] = {}
        self.rounds_since_plain = 0

    def copy(self) -> "_Costs":
        """Of another size of batch, until it is measured: one observation outweighs it."""
        other = _Costs()
        other.plain = _Mean(self.plain.value, 1)
        other.rounds = {length: _Mean(mean.value, 1) for length, mean in self.rounds.items()}
        return other

    @property
    def reach(self) -> int:
        """The longest draft whose cost can be guessed from those measured."""
        return 2 * max(self.rounds) + 1 if self.rounds else 1

    def round(self, length: int) -> float:
        """Seconds of a round. No less than of a plain step: what has been measured so was noise."""
        return max(self._round(length), self.plain.value)

    def _round(self, length: int) -> float:
        """Measured, between its neighbours, or on the line from a plain step through the longest one measured; before
        any was, a twentieth of a plain step an id."""
        if length in self.rounds:
            return self.rounds[length].value
        below = max((n for n in self.rounds if n < length), default=0)
        above = min((n for n in self.rounds if n > length), default=None)
        low = self.rounds[below].value if below else self.plain.value
        if above is not None:
            return low + (self.rounds[above].value - low) * (length - below) / (above - below)
        if not below:
            return self.plain.value * (1 + 0.05 * length)
        return self.plain.value + max(0.0, low - self.plain.value) * length / below

    def gain(self, length: int, rows: Iterable[RowPace]) -> float:
        """Ids a second with drafts of this length, over those of plain steps."""
        expected = [expected_tokens(row.rate, min(length, row.most)) for row in rows]
        return sum(expected) / len(expected) * self.plain.value / self.round(length)
