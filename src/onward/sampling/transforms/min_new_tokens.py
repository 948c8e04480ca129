"""The minimum number of new tokens, and the ids that end a text."""

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
    """min_new_tokens: no id of `eos` before this many tokens. (Stop strings still end the text.)
    eos: ids that end the text, banned until min_new_tokens; None means the checkpoint's.
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
        banned = () if history.output_length >= self.min_new_tokens else self.eos or ()
        return np.unique(np.array(banned, dtype=np.int64)), 0.0

    def named_ids(self) -> Iterable[int]:
        return self.eos or ()

    def can_ban(self) -> bool:
        return True

    adjust = staticmethod(ban)
