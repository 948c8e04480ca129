"""How many ids to draft: the expected number of accepted ids against the cost of a round, both measured while decoding.

Nothing else depends on measured times. They decide how much is drafted, never which ids are emitted.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

# The lengths of drafts. They are few, for the model runs with a shape of its own for each.
LENGTHS = (1, 2, 3, 4, 6, 8, 11, 15)
# The share of all time that drafting may lose. Probes are paid from it.
_BUDGET = 0.01
# Drafting must promise at least this gain over plain decoding to be done for its gain.
_MARGIN = 1.05
# The most credit that is kept, in plain steps. A small credit is soon used up when drafts no longer pay.
_MOST_CREDIT = 8.0
# After so many rounds without a plain step one is measured again, unless drafting promises the gain _FAR_AHEAD.
_STALE, _FAR_AHEAD = 32, 1.5
# The most choices between two probes.
_LONGEST_PATIENCE = 64
# The most plain steps in a row without asking the pace. Its answer is known then, and asking costs time too.
_LONGEST_REST = 128
# A step of a new shape that takes as long as this many plain steps has had a program made for it. Later steps of that
# shape cost less, so its time is not counted as their cost.
MADE_A_PROGRAM = 3.0


class AcceptanceRate:
    """How likely the next drafted id is to be accepted: a mean of outcomes that forgets old ones.

    rate: the rate to begin with. It weighs as much as `_WEIGHT` outcomes.
    """

    _WEIGHT = 4.0
    _DECAY = 0.92  # of the weight of earlier outcomes, at each new one

    def __init__(self, rate: float = 0.7) -> None:
        self._accepted = rate * self._WEIGHT
        self._tried = self._WEIGHT

    @property
    def rate(self) -> float:
        return self._accepted / self._tried

    def note(self, drafted: int, accepted: int) -> None:
        """Note that the first `accepted` of `drafted` ids were accepted.

        The next id is an outcome too: it was rejected. The ids after it say nothing.
        """
        for outcome in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._accepted = self._DECAY * self._accepted + outcome
            self._tried = self._DECAY * self._tried + 1.0


def expected_tokens(rate: float, length: int) -> float:
    """How many ids a round with a draft of this length is expected to emit: the accepted ones and the target's own."""
    return length + 1.0 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)


class RowAcceptance(NamedTuple):
    """rate: the row's acceptance. most: the most ids that a draft for the row can have."""

    rate: float
    most: int


class DraftLengthController:
    """Chooses the lengths of drafts for one model. What it learns is kept from request to request.

    It drafts under two conditions. Drafting promises more ids a second than plain decoding does, and a credit covers
    the loss if nothing is accepted. The credit is what earlier drafts have gained, and 1 % of all time spent so far.
    Where drafting promises nothing, it is probed now and then, ever more rarely, and paid from the same credit.

    So drafting slows nobody down by more than that 1 %. Errors of measurement come on top, and so do costs that are
    paid once: programs for new shapes and the draft model's prompt.

    clock: returns seconds. rest: how many of the next steps are plain ones in any case. `note_time` takes their time.

    Calls of several threads may share one. It takes no lock: what one thread adds while another looks makes a choice
    less good, and no text another.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._costs: dict[int, _Costs] = {}
        self._credit = 0.0
        self._since_probe = 0
        self._patience = 1
        self._probing = False
        self.rest = 0

    def choose(self, rows: Sequence[RowAcceptance], longest: int) -> int:
        """Ids to draft for each row of a batch, `longest` at most; 0 for a plain step."""
        costs = self._costs_of_batch(len(rows))
        self._probing = False
        self._since_probe += 1
        if costs.plain.count == 0:
            return 0
        lengths = [length for length in LENGTHS if length <= min(longest, costs.reach)]
        # The gain if drafts cost nothing. No length brings more.
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
        hopeful = [RowAcceptance(max(row.rate, 0.5), row.most) for row in rows]
        return self._affordable(lengths, {n: costs.gain(n, hopeful) for n in lengths}, costs)

    def _affordable(self, lengths: Sequence[int], gains: Mapping[int, float], costs: "_Costs") -> int:
        """The length of most gain among those whose loss the credit covers if nothing is accepted; 0 for none."""
        loss = {n: costs.round(n) - costs.plain.value for n in lengths}
        covered = [n for n in lengths if loss[n] <= self._credit]
        if covered:
            return max(covered, key=gains.__getitem__)
        missing = min(loss.values(), default=0.0) - self._credit
        self.rest = min(int(missing / (_BUDGET * costs.plain.value)), _LONGEST_REST)
        return 0

    def note_time(self, seconds: float) -> None:
        """Note time that was spent on something else: a prompt, or a plain step during `rest`."""
        self._credit += _BUDGET * seconds
        if self.rest:
            self.rest = max(0, self.rest - 1)
            self._since_probe += 1

    def note_plain(self, rows: int, seconds: float, *, drafting: float = 0.0, new: bool = False) -> None:
        """Note a plain step.

        drafting: how many of its seconds went to the pace and to a drafter that had nothing to propose.
        new: whether the step may have included the making of a program for its shape.
        """
        self._credit += _BUDGET * seconds - drafting
        costs = self._costs_of_batch(rows)
        costs.rounds_since_plain = 0
        if self._probing:
            self._since_probe = 0
        if not (new and (costs.plain.count == 0 or seconds > MADE_A_PROGRAM * costs.plain.value)):
            costs.plain.add(seconds - drafting)

    def note_round(self, rows: int, length: int, emitted: int, seconds: float, *, new: bool = False) -> None:
        """Note a round with drafts of up to `length` ids. It emitted `emitted` ids in all. new: as in `note_plain`."""
        costs = self._costs_of_batch(rows)
        costs.rounds_since_plain += 1
        if self._probing:
            self._since_probe = 0
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        made_a_program = new and seconds > MADE_A_PROGRAM * costs.plain.value
        if not made_a_program:
            costs.rounds.setdefault(length, RecentMean()).add(seconds)
        if costs.plain.count == 0:
            return
        spent = costs.round(length) if made_a_program else seconds
        gained = costs.plain.value * emitted / rows - spent
        self._credit = min(self._credit + _BUDGET * seconds + gained, _MOST_CREDIT * costs.plain.value)

    def _costs_of_batch(self, rows: int) -> "_Costs":
        """The costs of a batch of so many rows; where it is new, those of the nearest size measured."""
        costs = self._costs.get(rows)
        if costs is None:
            measured = [size for size, others in list(self._costs.items()) if others.plain.count]
            nearest = min(measured, key=lambda size: abs(size - rows), default=None)
            costs = self._costs[rows] = _Costs() if nearest is None else self._costs[nearest].copy()
        return costs


class RecentMean:
    """The mean of the first five values, then weighted to the latest. A single outlier moves it little."""

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value, self.count = value, count

    def add(self, value: float) -> None:
        count = self.count + 1
        if count > 1:
            value = min(value, 2 * self.value)
        self.value += max(1 / count, 0.2) * (value - self.value)
        self.count = count  # last: another thread divides by what was counted


class _Costs:
    """Seconds of a step for a batch of one size: of a plain step, and of a whole round by the length of its draft."""

    def __init__(self) -> None:
        self.plain = RecentMean()
        self.rounds: dict[int, RecentMean] = {}
        self.rounds_since_plain = 0

    def copy(self) -> "_Costs":
        """Costs for another size of batch, until it is measured. They weigh as much as one observation."""
        other = _Costs()
        other.plain = RecentMean(self.plain.value, 1)
        other.rounds = {length: RecentMean(mean.value, 1) for length, mean in list(self.rounds.items())}
        return other

    @property
    def reach(self) -> int:
        """The longest draft whose cost can be guessed from those measured."""
        return 2 * max(list(self.rounds), default=0) + 1

    def round(self, length: int) -> float:
        """Seconds of a round, at least those of a plain step: a round measured as shorter was noise."""
        return max(self._interpolated(length), self.plain.value)

    def _interpolated(self, length: int) -> float:
        """The seconds measured for this length, or else an estimate.

        Between two measured lengths it lies on the line between them. Past the longest one it lies on the line from a
        plain step through that one. Before any is measured, each id costs a twentieth of a plain step.
        """
        if length in self.rounds:
            return self.rounds[length].value
        measured = list(self.rounds)
        below = max((n for n in measured if n < length), default=0)
        above = min((n for n in measured if n > length), default=None)
        low = self.rounds[below].value if below else self.plain.value
        if above is not None:
            return low + (self.rounds[above].value - low) * (length - below) / (above - below)
        if not below:
            return self.plain.value * (1 + 0.05 * length)
        return self.plain.value + max(0.0, low - self.plain.value) * length / below

    def gain(self, length: int, rows: Iterable[RowAcceptance]) -> float:
        """Ids a second with drafts of this length, divided by those of plain steps."""
        expected = [expected_tokens(row.rate, min(length, row.most)) for row in rows]
        return sum(expected) / len(expected) * self.plain.value / self.round(length)
