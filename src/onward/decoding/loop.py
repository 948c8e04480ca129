"""The one loop. Streaming, batches, chat and anyone's function all run through it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from onward.decoding.row import Row
from onward.decoding.state import DecodeState
from onward.decoding.step import Step


class Emission(NamedTuple):
    """What one step brought.

    pieces: (row index, token id, text that became final) for every token a row accepted, in order.
    seconds: what the step took, without the time its consumer takes.
    state: after the step.
    """

    pieces: list[tuple[int, int, str]]
    seconds: float
    state: DecodeState


def decode_loop(step: Step, state: DecodeState, rows: Sequence[Row]) -> Iterator[Emission]:
    """Step until every row has ended. A row that has ended stands still: nothing is added to it.

    No step is run whose tokens nobody takes: the loop looks at the rows first.
    """
    live = [row.finish_reason is None for row in rows]
    while any(live):
        # Only a row that ended changes the mask, so that a steady step moves nothing to the device.
        if not all(live):
            state = replace(state, live=torch.tensor(live, device=state.live.device))
        began = time.perf_counter()
        state, emitted = step(state)
        seconds = time.perf_counter() - began
        pieces = []
        for index, (row, tokens) in enumerate(zip(rows, emitted, strict=True)):
            for token in tokens:
                if row.finish_reason is not None:
                    break
                pieces.append((index, token, row.accept(token)))
        live = [row.finish_reason is None for row in rows]
        yield Emission(pieces, seconds, state)
