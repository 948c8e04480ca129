"""Step times and throughput, estimated from the steps so far."""

import math
from collections.abc import Sequence

from onward.decoding.speculation.pace import MADE_A_PROGRAM, RecentMean

# Decoding rows cost as much as if they were this many more: a step reads all weights, however few its rows. A chunk
# beside them reads the cache before it, so it costs as much as if it had a few more tokens. The exact numbers matter
# little, because costs are measured at the sizes in use.
_READING_WEIGHTS, _READING_CACHE = 16, 4
# Rows of a new shape that take this many times as long as predicted are measured in the next step instead.
_NEW_SHAPE = 1.25
# The most steps with chunks before the cost of the decoding rows is measured alone again.
_MAX_MIXED = 16
# Positions below this one have the same cost per token. Each further range ends at twice the position.
_FIRST_RANGE = 512
# Seconds of work after which a count has a weight of 1/e in the throughput.
_WINDOW = 30.0

# (first position, tokens): a chunk of a prompt that one step processes.
Chunk = tuple[int, int]


class StepTimeModel:
    """Predicts the seconds of a step: the sum of a part for its decoding rows and one for each chunk of a prompt.

    n decoding rows cost `unit * (n + 16)` seconds, and a chunk of n tokens `unit * (n + 4)`. A unit is measured for
    each number of decoding rows, and for chunks for each range of positions, because attention takes longer at later
    positions. An unmeasured unit equals that of the nearest number of rows or range, until the first measurement.

    Decoding rows are measured in steps without chunks. What another step takes longer than predicted is due to its
    chunks: if both parts shared it, chunks that cost more than expected would also make decoding look slow, and a limit
    that is a multiple of it would rise. Both parts share it while the rows are not measured, and in steps that take
    less time than the rows were measured to take.
    """

    def __init__(self) -> None:
        self._decoding: dict[int, RecentMean] = {}
        self._chunks: dict[int, RecentMean] = {}
        self._mixed: dict[int, int] = {}  # for each measured number of rows, the steps since, which all had chunks
        self._shapes: set[tuple[str, int]] = set()

    def decode(self, rows: int) -> float:
        """Seconds of a step that decodes this many rows; 0 before any measurement."""
        return self._rows_unit(rows).value * (rows + _READING_WEIGHTS) if rows else 0.0

    def chunk(self, position: int, tokens: int) -> float:
        """Seconds that a chunk adds to a step; 0 before any measurement."""
        return self._chunk_unit(position).value * (tokens + _READING_CACHE)

    def is_stale(self, rows: int) -> bool:
        """Whether these decoding rows should be measured in a step without chunks."""
        return self._mixed.get(rows, _MAX_MIXED) >= _MAX_MIXED

    def record_step(self, rows: int, chunks: Sequence[Chunk], seconds: float) -> None:
        """Record a step. The first run of a shape, which may compile a program, counts little."""
        parts = [(self._rows_unit(rows), rows + _READING_WEIGHTS)] if rows else []
        parts += [(self._chunk_unit(position), tokens + _READING_CACHE) for position, tokens in chunks]
        shapes = {("rows" if chunks else "rows alone", rows), *(("chunk", tokens) for _, tokens in chunks)}
        new = not shapes <= self._shapes
        self._shapes |= shapes
        predicted, total = sum(unit.value * size for unit, size in parts), sum(size for _, size in parts)
        if not parts or seconds <= 0 or (predicted and new and seconds > MADE_A_PROGRAM * predicted):
            return
        ratio = seconds / predicted if predicted else 1.0
        if not chunks and predicted:
            if new and ratio > _NEW_SHAPE:
                return
            if rows not in self._mixed:
                parts[0][0].count = 0  # this measurement replaces the estimate
            self._mixed[rows] = 0
        elif rows in self._mixed:
            self._mixed[rows] += 1
            if seconds > (decoding := self.decode(rows)):
                # Not all of it, if the chunks are a small part of the step: much of it is then noise.
                ratio = 1 + (seconds - predicted) / max(predicted - decoding, predicted / 2)
                parts = parts[1:]
            else:
                del self._mixed[rows]
        for unit in {id(unit): unit for unit, _ in parts}.values():
            if predicted:
                unit.add(unit.value * ratio)
            else:
                unit.value = seconds / total

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
