"""The one loop. Streaming, batches, chat, speculation, forwards of the user's own and the engine all run through it."""

import time
from collections import abc
from collections.abc import Callable, Iterator
from typing import NamedTuple

from onward.decoding.forward import Work
from onward.decoding.sequence import Sequence
from onward.decoding.slots import Slots
from onward.decoding.step import Emitted, Step

# The work of the next step; none when all is done. It may admit sequences and remove them.
Schedule = Callable[[], abc.Sequence[Work]]
# Is told of a sequence that cannot go on, and why.
Failed = Callable[[Sequence, BaseException], None]


class Emission(NamedTuple):
    """What one step emitted.

    pieces: (sequence, token id, text that became final, whether it was drafted) for every token that a sequence
        accepted, in order.
    seconds: the time of the step, without the time of whoever consumes its emission.
    work: what the step did.
    """

    pieces: list[tuple[Sequence, int, str, bool]]
    seconds: float
    work: abc.Sequence[Work]


def decode_loop(step: Step, schedule: Schedule, slots: Slots, failed: Failed | None = None) -> Iterator[Emission]:
    """Step as long as there is work.

    Sequences alone say whether they have ended, and one that has ended takes no more tokens.

    failed: is told of a sequence that could not take its token, because a function of the user's raised. Without it
        the loop raises.
    """
    while work := schedule():
        began = time.perf_counter()
        emitted = step(work)
        seconds = time.perf_counter() - began
        yield Emission(_accepted(work, emitted, slots, failed), seconds, work)
        del work, emitted  # a schedule may wait for long, and must not keep ended sequences alive


def _accepted(
    work: abc.Sequence[Work], emitted: Emitted, slots: Slots, failed: Failed | None
) -> list[tuple[Sequence, int, str, bool]]:
    """Give each sequence its tokens, and tell the cache how far each text is computed."""
    pieces = []
    for (sequence, _), tokens in zip(work, emitted, strict=True):
        try:
            for left, token in zip(range(len(tokens) - 1, -1, -1), tokens, strict=True):
                if sequence.finish_reason is not None:
                    break
                # A step ends with the token that the model chose; those before it were drafted.
                pieces.append((sequence, token.id, sequence.accept(*token), left > 0))
        except BaseException as error:
            if failed is None:
                raise
            failed(sequence, error)
            continue
        if tokens:
            # The step's tokens after the end are not part of the text, so the cache drops them too.
            sequence.computed = min(sequence.computed, sequence.length - 1)
        if sequence.slot is not None:
            slots.advance(sequence.slot, sequence.computed, sequence.ids)
    return pieces
