"""Draft lengths: the expected number of accepted ids against the cost of a round, both measured while decoding.

Measured times decide only how much is drafted, never which ids are emitted.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

# Draft lengths. There are few, because the model runs with a separate shape for each.
LENGTHS = (1, 2, 3, 4, 6, 8, 11, 15)
# The share of all time that drafting may lose, including probes.
_BUDGET = 0.01
# The minimum expected gain over plain decoding.
_MARGIN = 1.05
# The maximum credit, in plain steps. A small credit is soon used up when drafts no longer pay.
_MAX_CREDIT = 8.0
# After this many rounds without a plain step, one is measured again, unless the expected gain is at least _HIGH_GAIN.
_STALE, _HIGH_GAIN = 32, 1.5
# The most choices between two probes.
_MAX_PATIENCE = 64
# The most consecutive plain steps without a choice, since choosing costs time too.
_MAX_REST = 128
# A step of a new shape that takes this many times as long as a plain step included compiling its program. Later steps
# of that shape cost less, so this one is not counted.
MADE_A_PROGRAM = 3.0


class AcceptanceRate:
    """The probability that the next drafted id is accepted: a decaying mean of outcomes.

    rate: the initial rate, with the weight of `_WEIGHT` outcomes.
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
        """Record that the first `accepted` of `drafted` ids were accepted and the next one rejected. Ids after it carry
        no information."""
        for outcome in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._accepted = self._DECAY * self._accepted + outcome
            self._tried = self._DECAY * self._tried + 1.0


def expected_tokens(rate: float, length: int) -> float:
    """The expected number of ids from a round with a draft of this length, including the target's own."""
    return length + 1.0 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)


class RowAcceptance(NamedTuple):
    """rate: the row's acceptance rate. limit: the longest draft for the row."""

    rate: float
    limit: int


class DraftLengthController:
    """Chooses draft lengths for one model, and learns across requests.

    It drafts if the expected throughput exceeds that of plain decoding and a credit covers the loss in case nothing is
    accepted. The credit is the gain of earlier drafts plus 1 % of all time spent. Otherwise it probes, ever less often,
    with the same credit. So drafting slows decoding down by at most that 1 %, plus measurement errors and one-time
    costs: programs for new shapes and the draft model's prefill.

    clock: returns seconds. rest: the number of next steps that are plain in any case; `note_time` records their time.

    Threads may share one without a lock: races make choices worse, but change no ids.
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
        """The number of ids to draft for each row of a batch, at most `longest`; 0 for a plain step."""
        costs = self._costs_of_batch(len(rows))
        self._probing = False
        self._since_probe += 1
        if costs.plain.count == 0:
            return 0
        lengths = [length for length in LENGTHS if length <= min(longest, costs.reach)]
        # The gain if drafts cost nothing, an upper bound.
        bound = sum(expected_tokens(row.rate, longest) for row in rows) / len(rows)
        gains = {n: costs.gain(n, rows) for n in lengths} if bound > _MARGIN else {}
        best = max(gains.values(), default=0.0)
        if best > _MARGIN:
            self._patience = 1
            if costs.rounds_since_plain >= _STALE and best < _HIGH_GAIN:
                return 0
            return self._affordable([n for n in lengths if gains[n] > _MARGIN], gains, costs)
        if self._since_probe < self._patience:
            self.rest = min(self._patience - self._since_probe, _MAX_REST)
            return 0
        self._probing = True
        hopeful = [RowAcceptance(max(row.rate, 0.5), row.limit) for row in rows]
        return self._affordable(lengths, {n: costs.gain(n, hopeful) for n in lengths}, costs)

    def _affordable(self, lengths: Sequence[int], gains: Mapping[int, float], costs: "_Costs") -> int:
        """The most profitable length whose loss the credit covers if nothing is accepted; 0 for none."""
        loss = {n: costs.round(n) - costs.plain.value for n in lengths}
        covered = [n for n in lengths if loss[n] <= self._credit]
        if covered:
            return max(covered, key=gains.__getitem__)
        missing = min(loss.values(), default=0.0) - self._credit
        self.rest = min(int(missing / (_BUDGET * costs.plain.value)), _MAX_REST)
        return 0

    def note_time(self, seconds: float) -> None:
        """Record other time: a prefill, or a plain step during `rest`."""
        self._credit += _BUDGET * seconds
        if self.rest:
            self.rest = max(0, self.rest - 1)
            self._since_probe += 1

    def note_plain(self, rows: int, seconds: float, *, drafting: float = 0.0, new: bool = False) -> None:
        """Record a plain step.

        drafting: its seconds spent on this controller and on a drafter without proposals.
        new: whether the step may have included compiling a program for its shape.
        """
        self._credit += _BUDGET * seconds - drafting
        costs = self._costs_of_batch(rows)
        costs.rounds_since_plain = 0
        if self._probing:
            self._since_probe = 0
        if not (new and (costs.plain.count == 0 or seconds > MADE_A_PROGRAM * costs.plain.value)):
            costs.plain.add(seconds - drafting)

    def note_round(self, rows: int, length: int, emitted: int, seconds: float, *, new: bool = False) -> None:
        """Record a round with drafts of up to `length` ids that emitted `emitted` ids. new: as in `note_plain`."""
        costs = self._costs_of_batch(rows)
        costs.rounds_since_plain += 1
        if self._probing:
            self._since_probe = 0
            self._patience = min(2 * self._patience, _MAX_PATIENCE)
        made_a_program = new and seconds > MADE_A_PROGRAM * costs.plain.value
        if not made_a_program:
            costs.rounds.setdefault(length, RecentMean()).add(seconds)
        if costs.plain.count == 0:
            return
        spent = costs.round(length) if made_a_program else seconds
        gained = costs.plain.value * emitted / rows - spent
        self._credit = min(self._credit + _BUDGET * seconds + gained, _MAX_CREDIT * costs.plain.value)

    def _costs_of_batch(self, rows: int) -> "_Costs":
        """The costs of a batch of this size, initially those of the nearest measured size."""
        costs = self._costs.get(rows)
        if costs is None:
            measured = [size for size, others in list(self._costs.items()) if others.plain.count]
            nearest = min(measured, key=lambda size: abs(size - rows), default=None)
            costs = self._costs[rows] = _Costs() if nearest is None else self._costs[nearest].copy()
        return costs


class RecentMean:
    """The mean of the first five values, then an exponential moving average with outliers clipped."""

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value, self.count = value, count

    def add(self, value: float) -> None:
        count = self.count + 1
        if count > 1:
            value = min(value, 2 * self.value)
        self.value += max(1 / count, 0.2) * (value - self.value)
        self.count = count  # last: another thread checks it before it reads the value


class _Costs:
    """Seconds per step for one batch size: of a plain step, and of a round by its draft length."""

    def __init__(self) -> None:
        self.plain = RecentMean()
        self.rounds: dict[int, RecentMean] = {}
        self.rounds_since_plain = 0

    def copy(self) -> "_Costs":
        """Initial costs for another batch size, with the weight of one observation."""
        other = _Costs()
        other.plain = RecentMean(self.plain.value, 1)
        other.rounds = {length: RecentMean(mean.value, 1) for length, mean in list(self.rounds.items())}
        return other

    @property
    def reach(self) -> int:
        """The longest draft whose cost can be extrapolated."""
        return 2 * max(list(self.rounds), default=0) + 1

    def round(self, length: int) -> float:
        """Seconds of a round, at least those of a plain step: a round measured as shorter was noise."""
        return max(self._interpolated(length), self.plain.value)

    def _interpolated(self, length: int) -> float:
        """The measured seconds for this length, or an estimate: linear between two measured lengths, past the longest
        on the line from a plain step through it, and before any measurement a twentieth of a plain step per id."""
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
        """The throughput with drafts of this length, relative to plain steps."""
        expected = [expected_tokens(row.rate, min(length, row.limit)) for row in rows]
        return sum(expected) / len(expected) * self.plain.value / self.round(length)


# A forward over this many ids takes about twice as long as over one: between 7 and 22 on CPUs.
_DOUBLING_LENGTH = 16


def paying_length(forced: Sequence[int]) -> int:
    """The number of forced ids to draft per row that emits the most ids for the time of its forward; 0 for none.

    forced: the number of forced ids in each row. Every row is padded to the longest draft, so ids forced in one row
    cost time in all.
    """

    def throughput(length: int) -> float:
        emitted = sum(1 + min(length, count) for count in forced)
        return emitted / (_DOUBLING_LENGTH + len(forced) * (1 + length))

    return max(range(max(forced, default=0) + 1), key=throughput)
