"""How long a step takes, as a sum that is fitted from measured steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Step(NamedTuple):
    """A step that was run. rows: that decode. context: positions that they read, of all together. chunks: of prompts,
    each its first position and its tokens. seconds: from the end of the step before, or from when there was work.
    """

    rows: int
    context: int
    chunks: list[tuple[int, int]]
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: those of any, of a row, of a position that a row reads, of a chunk, of a prompt's token, and
    of a position that one of these attends to.
    """

    step: float
    row: float
    position: float
    chunk: float
    token: float
    pair: float

    def decode(self, rows: int, context: int) -> float:
        return self.step + self.row * rows + self.position * context

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> float:
        return sum(self.chunk + self.token * tokens + self.pair * _pairs(at, tokens) for at, tokens in chunks)

    def seconds(self, rows: int, context: int, chunks: Sequence[tuple[int, int]]) -> float:
        return self.decode(rows, context) + self.prefill(chunks)


def fit(steps: Sequence[Step]) -> StepTime:
    """The sum with the least squares of relative errors whose parts are not negative.

    The tenth of the steps that is farthest from a first fit is left out of the second: they made programs, or the
    machine did something else.
    """
    kept = list(steps)
    for share in (0.9, 1.0):
        found = _least_squares(kept)
        kept.sort(key=lambda step: abs(error(found, step)))
        kept = kept[: round(share * len(kept))]
        found = _least_squares(kept)
    return found


def error(time: StepTime, step: Step) -> float:
    """How far the prediction is off, as a share of what was measured."""
    return time.seconds(step.rows, step.context, step.chunks) / step.seconds - 1


def _pairs(position: int, tokens: int) -> float:
    """Positions that the tokens of a chunk attend to, of all together."""
    return tokens * (position + tokens / 2)


def _least_squares(steps: Sequence[Step]) -> StepTime:
    rows = [
        (
            1.0,
            step.rows,
            step.context,
            len(step.chunks),
            sum(tokens for _, tokens in step.chunks),
            sum(_pairs(*chunk) for chunk in step.chunks),
        )
        for step in steps
    ]
    seconds = np.array([step.seconds for step in steps])
    matrix = np.array(rows) / seconds[:, None]
    used = list(range(matrix.shape[1]))
    while True:  # a part that comes out negative is no part
        solution = np.linalg.lstsq(matrix[:, used], np.ones(len(steps)), rcond=None)[0]
        if solution.min() >= 0:
            break
        used.pop(int(solution.argmin()))
    parts = dict(zip(used, solution, strict=True))
    return StepTime(*(float(parts.get(at, 0.0)) for at in range(matrix.shape[1])))
