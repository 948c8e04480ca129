"""The minimum number of new tokens, and the ids that end a text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from onward.sampling.history import History
from onward.sampling.transforms.transform import Adjustment, Changes, ban
from onward.util.options import LENGTH, option


@dataclass(frozen=True, kw_only=True)
class MinNewTokens(Adjustment):
    """min_new_tokens: no id of `eos` before this many tokens. (Stop strings still end the text.)
    eos: ids that end the text, banned until min_new_tokens; None means the checkpoint's.
    ignore_eos: let no id end the text.
    """

    min_new_tokens: int = option(0, low=0, help="Ban end tokens until N tokens are generated.", group=LENGTH)
    eos: tuple[int, ...] | None = option(None, low=0, help="Stop after token ID.", group=LENGTH, metavar="ID")
    ignore_eos: bool = option(False, help="Do not stop at end tokens.", group=LENGTH)

    def is_on(self) -> bool:
        return bool(self.min_new_tokens and self.eos and not self.ignore_eos)

    def changes(self, history: History) -> Changes:
        banned = () if history.output_length >= self.min_new_tokens else self.eos or ()
        return np.unique(np.array(banned, dtype=np.int64)), 0.0

    def named_ids(self) -> Mapping[str, Iterable[int]]:
        return {"eos": self.eos or ()}

    def can_ban(self) -> bool:
        return True

    adjust = staticmethod(ban)
