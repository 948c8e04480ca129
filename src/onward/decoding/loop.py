"""The one loop. Streaming, batches, chat, speculation and anyone's function all run through it."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
    """Step until every row has ended. A row that has ended takes nothing more, and costs nothing more where the
    cache can be narrowed.

    No step is run whose tokens nobody takes: the loop looks at the rows first.
    """
    going_on = [row.finish_reason is None for row in rows]
    while any(going_on):
        # Only a row that ended changes the state.
        if not all(going_on[owner] for owner, live in zip(state.owners, state.live, strict=True) if live):
            state = state.only(going_on)
        began = time.perf_counter()
        owners = state.owners
        state, emitted = step(state)
        seconds = time.perf_counter() - began
        pieces = []
        for place, (owner, tokens) in enumerate(zip(owners, emitted, strict=True)):
            row = rows[owner]
            for taken, token in enumerate(tokens):
                if row.finish_reason is not None:
                    if taken:
                        # What the step went on with is no part of the text: the cache holds nothing of it either.
                        state = state.taken_back(place, tokens[taken - 1].id, len(tokens) - taken)
                    break
                pieces.append((owner, token.id, row.accept(*token)))
        going_on = [row.finish_reason is None for row in rows]
        yield Emission(pieces, seconds, state)
