"""The one loop. Streaming, batches, chat, speculation and forwards of the user's own all run through it."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onward.decoding.row import Row
from onward.decoding.state import DecodeState
from onward.decoding.step import Step


class Emission(NamedTuple):
    """What one step emitted.

    pieces: (row index, token id, text that became final) for every token a row accepted, in order.
    seconds: the time of the step, without the time of whoever consumes its emission.
    state: the state after the step.
    """

    pieces: list[tuple[int, int, str]]
    seconds: float
    state: DecodeState


def decode_loop(step: Step, state: DecodeState, rows: Sequence[Row]) -> Iterator[Emission]:
    """Step until every row has ended.

    A row that has ended takes no more tokens. Where the cache can be narrowed, it costs no more time either. The loop
    looks at the rows before it steps, so that no step runs whose tokens nobody takes.
    """
    going_on = [row.finish_reason is None for row in rows]
    while any(going_on):
        # The state is narrowed only when a row has ended.
        if not all(going_on[owner] for owner, live in zip(state.owners, state.live, strict=True) if live):
            state = state.only(going_on)
        began = time.perf_counter()
        owners = state.owners
        state, emitted = step(state)
        seconds = time.perf_counter() - began
        pieces = []
        for place, (owner, tokens) in enumerate(zip(owners, emitted, strict=True)):
            row = rows[owner]
            for accepted, token in enumerate(tokens):
                if row.finish_reason is not None:
                    if accepted:
                        # The step's tokens after the end are not part of the text, so the cache drops them too.
                        state = state.taken_back(place, tokens[accepted - 1].id, len(tokens) - accepted)
                    break
                pieces.append((owner, token.id, row.accept(*token)))
        going_on = [row.finish_reason is None for row in rows]
        yield Emission(pieces, seconds, state)
