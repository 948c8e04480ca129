"""The fewest tokens of a text, and the ids that end it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from onward.sampling.history import History
from onward.sampling.transforms.transform import Adjustment, Changes, ban
from onward.util.checks import as_tuple, check_whole


class MinNewTokensDict(TypedDict, total=False):
    min_new_tokens: int
    eos: int | Sequence[int] | None
    ignore_eos: bool


@dataclass(frozen=True, kw_only=True)
class MinNewTokens(Adjustment):
    """min_new_tokens: no id of `eos` before this many tokens. (A stop string ends the text all the same.)
    eos: ids that end the text, and that min_new_tokens holds back; None means the checkpoint's.
    ignore_eos: let no id end the text.
    """

    min_new_tokens: int = 0
    eos: tuple[int, ...] | None = None
    ignore_eos: bool = False

    def check(self) -> None:
        check_whole("min_new_tokens", self.min_new_tokens, low=0)
        if self.eos is not None:
            self._set("eos", as_tuple("eos", self.eos, int))
        for token in self.eos or ():
            check_whole("eos", token, low=0)

    def is_on(self) -> bool:
        return bool(self.min_new_tokens and self.eos and not self.ignore_eos)

    def changes(self, history: History) -> Changes:
        held_back = () if history.output_length >= self.min_new_tokens else self.eos or ()
        return np.unique(np.array(held_back, dtype=np.int64)), 0.0

    def named_ids(self) -> Iterable[int]:
        return self.eos or ()

    def can_ban(self) -> bool:
        return True

    adjust = staticmethod(ban)
