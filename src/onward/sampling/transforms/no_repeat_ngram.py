"""No repeated n-grams."""

from dataclasses import dataclass

import numpy as np

from onward.sampling.history import History, Ids
from onward.sampling.transforms.transform import Adjustment, Changes, ban
from onward.util.options import REPETITION, option


@dataclass(frozen=True, kw_only=True)
class NoRepeatNgram(Adjustment):
    """no_repeat_ngram_size: no n ids in a row occur twice in prompt and output; 0 disables it."""

    no_repeat_ngram_size: int = option(0, low=0, help="Never repeat a sequence of N tokens; 0: off.", group=REPETITION)

    def is_on(self) -> bool:
        return self.no_repeat_ngram_size > 0

    def changes(self, history: History) -> Changes:
        return ngram_ends(history.ids, self.no_repeat_ngram_size), 0.0

    def can_ban(self) -> bool:
        return True

    adjust = staticmethod(ban)


def ngram_ends(ids: Ids, size: int) -> Ids:
    """The ids that would repeat an n-gram of `size` ids, sorted: int64 [N] (Paulus et al., arXiv 1705.04304, and
    transformers)."""
    starts = len(ids) - size + 1  # the number of n-grams
    if starts < 1:
        return ids[:0]
    again = np.ones(starts, dtype=bool)
    for place in range(size - 1):
        again &= ids[place : place + starts] == ids[starts + place]
    return np.unique(ids[size - 1 :][again])
