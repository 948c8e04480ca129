"""Step times and throughput, estimated from the steps so far."""

import math
from collections.abc import Sequence

from onward.decoding.speculation.pace import MADE_A_PROGRAM, RecentMean

# A part of a step costs as much as if it had this many more tokens: it reads all weights, however few its tokens.
# The exact number matters little, because the cost per token is measured at the sizes in use.
_READING_WEIGHTS = 16
# Positions below this one have the same cost per token. Each further range ends at twice the position.
_FIRST_RANGE = 512
# Seconds of work after which a count has a weight of 1/e in the throughput.
_WINDOW = 30.0

# (first position, tokens): a chunk of a prompt that one step processes.
Chunk = tuple[int, int]


class StepTimeModel:
    """Predicts the seconds of a step: the sum of a part for its decoding rows and one for each chunk of a prompt.

    A part of n tokens costs `unit * (n + 16)` seconds. A unit is measured for each number of decoding rows, and for
    chunks for each range of positions, because attention takes longer at later positions. An unmeasured unit equals
    that of the nearest number of rows or range. A step's seconds are divided among its parts as predicted, so that
    parts that never run alone are learned too.
    """

    def __init__(self) -> None:
        self._decoding: dict[int, RecentMean] = {}
        self._chunks: dict[int, RecentMean] = {}
        self._shapes: set[tuple[str, int]] = set()

    def decode(self, rows: int) -> float:
        """Seconds of a step that decodes this many rows; 0 before any measurement."""
        return self._rows_unit(rows).value * (rows + _READING_WEIGHTS) if rows else 0.0

    def chunk(self, position: int, tokens: int) -> float:
        """Seconds that a chunk adds to a step; 0 before any measurement."""
        return self._chunk_unit(position).value * (tokens + _READING_WEIGHTS)

    def record_step(self, rows: int, chunks: Sequence[Chunk], seconds: float) -> None:
        """Record a step. The first run of a shape, which may compile a program, counts little."""
        parts = [(self._rows_unit(rows), rows)] if rows else []
        parts += [(self._chunk_unit(position), tokens) for position, tokens in chunks]
        shapes = {("rows", rows), *(("chunk", tokens) for _, tokens in chunks)}
        new = not shapes <= self._shapes
        self._shapes |= shapes
        units = {id(unit): unit for unit, _ in parts}.values()
        predicted = sum(unit.value * (tokens + _READING_WEIGHTS) for unit, tokens in parts)
        if not parts or seconds <= 0:
            return
        if not predicted:
            for unit in units:
                unit.value = seconds / sum(tokens + _READING_WEIGHTS for _, tokens in parts)
        elif not (new and seconds > MADE_A_PROGRAM * predicted):
            for unit in units:
                unit.add(unit.value * seconds / predicted)

    def _rows_unit(self, rows: int) -> RecentMean:
        return _unit_at(rows, self._decoding, self._chunks)

    def _chunk_unit(self, position: int) -> RecentMean:
        return _unit_at((position // _FIRST_RANGE).bit_length(), self._chunks, self._decoding)


def _unit_at(place: int, units: dict[int, RecentMean], others: dict[int, RecentMean]) -> RecentMean:
    """The unit at a place; if it is new, a copy of the nearest measured one with the weight of one observation."""
    if place not in units or not units[place].value:
        measured = [at for at, unit in units.items() if unit.value]
        if measured:
            like = units[min(measured, key=lambda at: abs(at - place))]
        else:
            like = next((unit for unit in others.values() if unit.value), RecentMean())
        units[place] = RecentMean(like.value, min(like.count, 1))
    return units[place]


class Throughput:
    """Prompt tokens, output tokens and admitted requests per second of work, mostly over the latest half minute; 0
    before the first step. Idle time does not count."""

    def __init__(self) -> None:
        self._seconds = self._prompt = self._output = self._admitted = 0.0

    def record_step(self, seconds: float, *, prompt: int, output: int, admitted: int) -> None:
        """Record a step: the prompt tokens it processed, the tokens it emitted, and the requests admitted for it."""
        keep = math.exp(-seconds / _WINDOW)
        self._seconds = keep * self._seconds + seconds
        self._prompt = keep * self._prompt + prompt
        self._output = keep * self._output + output
        self._admitted = keep * self._admitted + admitted

    @property
    def prompt(self) -> float:
        return self._rate(self._prompt)

    @property
    def output(self) -> float:
        return self._rate(self._output)

    @property
    def admitted(self) -> float:
        return self._rate(self._admitted)

    def _rate(self, amount: float) -> float:
        return amount / self._seconds if self._seconds else 0.0
