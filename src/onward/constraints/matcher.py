"""`GrammarConstraint`: a grammar's matcher of llguidance as a `Constraint`."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Self

import llguidance
import numpy as np

from onward.errors import RequestError
from onward.sampling.constraint import Constraint, Mask

# The most words that llguidance's masks are made longer by, for ids that end a text and that the tokenizer lacks.
_BITS = 32


class _Place(NamedTuple):
    """What a grammar says of one place. mask: what may follow, ids that end the text too. is_done: nothing may."""

    mask: Mask
    is_done: bool


class GrammarConstraint(Constraint):
    """A compiled grammar, after the ids that it has accepted.

    matcher: stands where this does. end: the id that stands for the end of the text there. stop_ids: those that end it
    here; they are admitted where the grammar is complete, and nowhere else. name: of the grammar, for errors.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        end: int,
        stop_ids: AbstractSet[int] = frozenset(),
        name: str = "the grammar",
    ) -> None:
        self._matcher, self._end, self._stop_ids, self._name = matcher, end, stop_ids, name
        self._place: _Place | None = None

    def mask(self) -> Mask:
        return self._here().mask

    @property
    def is_done(self) -> bool:
        return self._here().is_done

    def accept(self, token_id: int) -> None:
        self._place = None
        self._matcher.consume_token(token_id)
        self._check()

    def rollback(self, count: int) -> None:
        self._place = None
        self._matcher.rollback(count)
        self._check()

    def fork(self) -> Self:
        other = type(self)(self._matcher.deep_copy(), self._end, self._stop_ids, self._name)
        other._place = self._place
        return other

    def forced(self) -> Sequence[int]:
        return [token for token in self._matcher.compute_ff_tokens() if token != self._end]

    def _here(self) -> _Place:
        if self._place is None:
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
            self._check()
            longest = max((*self._stop_ids, self._end)) // _BITS + 1
            mask = np.zeros(max(len(words), longest), dtype=np.int32)
            mask[: len(words)] = words
            may_end = _take(mask, self._end)
            for token in self._stop_ids:
                _take(mask, token)
            is_done = self._matcher.is_stopped() or (may_end and not mask.any())
            if may_end:
                for token in self._stop_ids:
                    mask.view(np.uint32)[token // _BITS] |= np.uint32(1 << token % _BITS)
            self._place = _Place(mask, is_done)
        return self._place

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"{self._name} cannot be followed any further: {brief(self._matcher.get_error())}")


def _take(mask: Mask, token_id: int) -> bool:
    """Take an id out of a mask, and say whether it was there."""
    words, bit = mask.view(np.uint32), np.uint32(1 << token_id % _BITS)
    was_there = bool(words[token_id // _BITS] & bit)
    words[token_id // _BITS] &= ~bit
    return was_there


def brief(message: str) -> str:
    """llguidance's message on one line, without what it says of its own state."""
    for inner in ("<state>", "<backtrace>", "<non-verbose/>"):
        message = message.partition(inner)[0]
    return " ".join(message.split())[:400]
