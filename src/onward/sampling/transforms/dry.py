"""DRY: penalties that grow with the length of a repetition."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from onward.sampling.history import History, Ids
from onward.sampling.transforms.transform import Adjustment, Changes, check_switch
from onward.util.options import FLOAT32_MAX, REPETITION, option


@dataclass(frozen=True, kw_only=True)
class Dry(Adjustment):
    """dry_multiplier, dry_base, dry_allowed_length, dry_sequence_breakers: "don't repeat yourself".

    An id that would extend a repetition of n ids, n at least dry_allowed_length, loses dry_multiplier *
    dry_base^(n - dry_allowed_length). Repetitions don't extend across the breakers, which are ids. A multiplier of 0
    disables it.
    """

    dry_multiplier: float = option(
        0.0, low=0, help="Strength of the penalty on repeated sequences (DRY); 0: off.", group=REPETITION
    )
    dry_base: float = option(
        1.75, low=1, help="Growth of the DRY penalty with the length of the repetition.", group=REPETITION
    )
    dry_allowed_length: int = option(
        2, low=1, help="Longest repetition without a DRY penalty, in tokens.", group=REPETITION
    )
    dry_sequence_breakers: tuple[int, ...] = option(
        (), low=0, help="Ids across which repetitions don't extend (DRY).", group=REPETITION, flag=""
    )

    def check(self) -> None:
        check_switch(self, Dry, "dry_multiplier")

    def is_on(self) -> bool:
        return self.dry_multiplier > 0

    def changes(self, history: History) -> Changes:
        costs = dry_penalties(
            history.ids,
            multiplier=self.dry_multiplier,
            base=self.dry_base,
            allowed_length=self.dry_allowed_length,
            breakers=self.dry_sequence_breakers,
        )
        return np.array(list(costs), dtype=np.int64), [-cost for cost in costs.values()]


def dry_penalties(
    ids: Ids, *, multiplier: float, base: float, allowed_length: int, breakers: Collection[int] = ()
) -> dict[int, float]:
    """ "Don't repeat yourself": id -> the number to subtract from its logit.

    An id that would extend a repetition costs multiplier * base^(n - allowed_length), where n is the length of the
    longest suffix of `ids` that occurred directly before that id; less than `allowed_length` costs nothing.
    Repetitions don't extend across breakers, which cost nothing themselves. (P. E. Weidmann, text-generation-webui pull
    request 5677; the same as llama.cpp's `dry` sampler.) No cost is above the largest float32.
    """
    if len(ids) < 2 or int(ids[-1]) in breakers:
        return {}
    longest: dict[int, int] = {}
    max_length = _max_length(multiplier, base, allowed_length, len(ids))
    # Earlier occurrences of the last id; then of longer suffixes, one id at a time.
    ends, length = np.flatnonzero(ids[:-1] == ids[-1]), 1
    while len(ends):
        # Record repetitions that don't extend; longer ones come later and overwrite shorter ones.
        before = ids[-1 - length] if length < max_length else None
        if before is None or int(before) in breakers:
            extends = np.zeros(len(ends), dtype=bool)
        else:
            extends = (ends >= length) & (ids[ends - length] == before)
        if length >= allowed_length:
            longest.update(dict.fromkeys(ids[ends[~extends] + 1].tolist(), length))
        ends, length = ends[extends], length + 1
    return {
        token: _power(multiplier, base, length - allowed_length)
        for token, length in longest.items()
        if token not in breakers
    }


def _max_length(multiplier: float, base: float, allowed_length: int, length: int) -> int:
    """The length of a repetition beyond which the penalty no longer grows."""
    if base == 1:
        return min(allowed_length, length)
    steps = math.log(FLOAT32_MAX) - math.log(multiplier)
    return min(allowed_length + 1 + max(0, math.ceil(steps / math.log(base))), length)


def _power(multiplier: float, base: float, exponent: int) -> float:
    try:
        return min(multiplier * base**exponent, FLOAT32_MAX)
    except OverflowError:
        return FLOAT32_MAX
