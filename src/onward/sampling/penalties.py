"""What shifts the logits of single ids: bias, repetition, presence and frequency penalties, DRY; and what bans ids.

Pure functions: those over logits take float32 [B, V] and `Entries`, those over a row's ids take an int64 array of
its prompt and output. Ids that none of them names keep their logits, bit for bit.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onward.sampling.history import Ids

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Entries(NamedTuple):
    """Places in logits [B, V], each at most once, with a number for each: rows, ids int64 [N], values float32 [N]."""

    rows: Tensor
    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, parts: Iterable[tuple[int, Ids, Ids | Sequence[float] | float]], device: torch.device) -> "Entries":
        """Of (row, ids, their values or one for all) parts."""
        kept = [(row, ids, values) for row, ids, values in parts if len(ids)]
        if not kept:
            nothing = torch.empty(0, dtype=torch.int64, device=device)
            return cls(nothing, nothing, nothing.to(torch.float32))
        rows = np.concatenate([np.full(len(ids), row) for row, ids, _ in kept])
        values = np.concatenate([np.broadcast_to(np.asarray(v, dtype=np.float32), len(ids)) for _, ids, v in kept])
        places = np.concatenate([ids for _, ids, _ in kept])
        return cls(*(torch.from_numpy(array).to(device) for array in (rows, places, values)))


def apply_shift(logits: Tensor, shifts: Entries) -> Tensor:
    """Add each value to its logit: logit_bias as it is given, DRY's penalties negated; -inf bans."""
    return _changed(logits, shifts, _at(logits, shifts) + shifts.values)


def apply_repetition_penalty(logits: Tensor, seen: Entries) -> Tensor:
    """Make ids that occurred less likely (values above 1) or more (below): logits above 0 are divided by the value,
    the others multiplied. (Keskar et al., CTRL, arXiv 1909.05858; both signs as transformers)
    """
    found = _at(logits, seen)
    return _changed(logits, seen, torch.where(found < 0, found * seen.values, found / seen.values))


def apply_presence_penalty(logits: Tensor, drawn: Entries, penalty: Tensor) -> Tensor:
    """Subtract a row's penalty, float32 [B], from the ids that its output holds; `drawn` has their counts.

    (OpenAI's API reference, `presence_penalty`)
    """
    return _changed(logits, drawn, _at(logits, drawn) - penalty[drawn.rows])


def apply_frequency_penalty(logits: Tensor, drawn: Entries, penalty: Tensor) -> Tensor:
    """Subtract a row's penalty, float32 [B], once for each time that its output holds the id.

    (OpenAI's API reference, `frequency_penalty`)
    """
    return _changed(logits, drawn, _at(logits, drawn) - drawn.values * penalty[drawn.rows])


def apply_ban(logits: Tensor, banned: Entries) -> Tensor:
    """-inf for each; the values count for nothing."""
    return _changed(logits, banned, torch.full_like(banned.values, float("-inf")))


def dry_penalties(
    ids: Ids, *, multiplier: float, base: float, allowed_length: int, breakers: Collection[int] = ()
) -> dict[int, float]:
    """ "Don't repeat yourself": id -> what is to be subtracted from its logit.

    An id that would extend a repetition costs multiplier * base^(n - allowed_length), where n is the length of the
    longest end of `ids` that occurred before right in front of that id; less than `allowed_length` costs nothing.
    A repetition does not reach across a breaker, and a breaker costs nothing itself. (P. E. Weidmann,
    text-generation-webui pull request 5677; llama.cpp's `dry` sampler does the same.) No cost is above the largest
    float32.
    """
    if len(ids) < 2 or int(ids[-1]) in breakers:
        return {}
    longest: dict[int, int] = {}
    most = _longest_that_matters(multiplier, base, allowed_length, len(ids))
    # Where the last id occurred before; then, one id further back at a time, where the rest fits too.
    ends, length = np.flatnonzero(ids[:-1] == ids[-1]), 1
    while len(ends):
        # Longer ones are found later and take the place of shorter ones; those that get no longer are noted here.
        before = ids[-1 - length] if length < most else None
        if before is None or int(before) in breakers:
            goes_on = np.zeros(len(ends), dtype=bool)
        else:
            goes_on = (ends >= length) & (ids[ends - length] == before)
        if length >= allowed_length:
            longest.update(dict.fromkeys(ids[ends[~goes_on] + 1].tolist(), length))
        ends, length = ends[goes_on], length + 1
    return {
        token: _power(multiplier, base, length - allowed_length)
        for token, length in longest.items()
        if token not in breakers
    }


def ngram_ends(ids: Ids, size: int) -> Ids:
    """The ids that would make the last `size` ids of a row ones that it had before, sorted: int64 [N].

    (`no_repeat_ngram_size` of Paulus et al., arXiv 1705.04304, and of transformers)
    """
    starts = len(ids) - size + 1  # of the n-grams there are
    if starts < 1:
        return ids[:0]
    again = np.ones(starts, dtype=bool)
    for place in range(size - 1):
        again &= ids[place : place + starts] == ids[starts + place]
    return np.unique(ids[size - 1 :][again])


def word_ends(ids: Ids, words: Collection[tuple[int, ...]]) -> Ids:
    """The ids that would complete one of `words`, sequences of ids: int64 [N], each once."""
    found = [word[-1] for word in words if len(word) <= len(ids) + 1 and _ends_in(ids, word[:-1])]
    return np.unique(np.array(found, dtype=np.int64))


def _ends_in(ids: Ids, start: tuple[int, ...]) -> bool:
    return not start or ids[-len(start) :].tolist() == list(start)


def _longest_that_matters(multiplier: float, base: float, allowed_length: int, length: int) -> int:
    """Where the penalty grows no further: repetitions need not be followed beyond."""
    if base == 1:
        return min(allowed_length, length)
    steps = math.log(_FLOAT32_MAX) - math.log(multiplier)
    return min(allowed_length + 1 + max(0, math.ceil(steps / math.log(base))), length)


def _power(multiplier: float, base: float, exponent: int) -> float:
    try:
        return min(multiplier * base**exponent, _FLOAT32_MAX)
    except OverflowError:
        return _FLOAT32_MAX


def _at(logits: Tensor, entries: Entries) -> Tensor:
    return logits[entries.rows, entries.ids]


def _changed(logits: Tensor, entries: Entries, values: Tensor) -> Tensor:
    return logits.index_put((entries.rows, entries.ids), values) if len(values) else logits
