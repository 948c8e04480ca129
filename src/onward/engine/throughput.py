"""How long a step takes and how much is done a second, both learnt from the steps that were run."""

import math
from collections.abc import Iterable, Sequence

from onward.decoding.speculation.pace import MADE_A_PROGRAM, RecentMean

# A part of a step costs as much as if it had this many tokens more: it reads all weights, however few its tokens.
# The exact number matters little, for the unit of cost is measured at the sizes that are in use.
_READING_WEIGHTS = 16
# Positions below this one have one unit of cost. From there on each range ends where the positions have doubled.
_FIRST_RANGE = 512
# Seconds of work after which a count weighs 1/e in the throughput.
_WINDOW = 30.0

# (first position, tokens): a run of a prompt's tokens that one step processes.
Chunk = tuple[int, int]


class StepTimeModel:
    """Predicts the seconds of a step: the sum of a part for its decoding rows and one for each chunk of a prompt.

    A part of n tokens costs `unit * (n + 16)` seconds. The units are measured: one for each number of decoding rows,
    and for chunks one for each range of positions, for attention grows with the position. A unit that was not measured
    yet is that of the nearest number of rows or range. A step's seconds are shared among its parts as predicted, so
    parts that never run alone are learnt too.
    """

    def __init__(self) -> None:
        self._decoding: dict[int, RecentMean] = {}
        self._chunks: dict[int, RecentMean] = {}
        self._shapes: set[tuple[str, int]] = set()

    def decode(self, rows: int) -> float:
        """Seconds of a step in which so many rows decode; 0 as long as nothing at all was measured."""
        return self._rows_unit(rows).value * (rows + _READING_WEIGHTS) if rows else 0.0

    def chunk(self, position: int, tokens: int) -> float:
        """Seconds that a chunk adds to a step; 0 as long as nothing at all was measured."""
        return self._chunk_unit(position).value * (tokens + _READING_WEIGHTS)

    def note(self, rows: int, chunks: Sequence[Chunk], seconds: float) -> None:
        """Note a step that took so many seconds. The first run of a shape, which may make a program, counts little."""
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
    """The unit at a place; where it is new, a copy of the nearest measured one, which weighs as one observation."""
    if place not in units or not units[place].value:
        measured = [at for at, unit in units.items() if unit.value]
        like = units[min(measured, key=lambda at: abs(at - place))] if measured else _any_measured(others.values())
        units[place] = RecentMean() if like is None else RecentMean(like.value, min(like.count, 1))
    return units[place]


def _any_measured(units: Iterable[RecentMean]) -> RecentMean | None:
    return next((unit for unit in units if unit.value), None)


class Throughput:
    """Prompt tokens, output tokens and admitted requests a second of work. Idle time does not count.

    The latest half minute or so of work decides; what was before is forgotten.
    """

    def __init__(self) -> None:
        self._seconds = self._prompt = self._output = self._admitted = 0.0

    def note(self, seconds: float, *, prompt: int, output: int, admitted: int) -> None:
        """Note a step: how many tokens of prompts it processed, tokens it emitted, and requests joined for it."""
        keep = math.exp(-seconds / _WINDOW)
        self._seconds = keep * self._seconds + seconds
        self._prompt = keep * self._prompt + prompt
        self._output = keep * self._output + output
        self._admitted = keep * self._admitted + admitted

    @property
    def prompt(self) -> float:
        """Prompt tokens a second; 0 before any step."""
        return self._prompt / self._seconds if self._seconds else 0.0

    @property
    def output(self) -> float:
        """Output tokens a second; 0 before any step."""
        return self._output / self._seconds if self._seconds else 0.0

    @property
    def admitted(self) -> float:
        """Requests a second that joined those running; 0 before any step."""
        return self._admitted / self._seconds if self._seconds else 0.0
