"""The frequency penalty: ids of the output less likely, the more often the less."""

from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from onward.checks import is_float32
from onward.errors import RequestError
from onward.sampling.history import History
from onward.sampling.transforms.transform import Adjustment, Changes


class FrequencyPenaltyDict(TypedDict, total=False):
    frequency_penalty: float


@dataclass(frozen=True, kw_only=True)
class FrequencyPenalty(Adjustment):
    """frequency_penalty: subtracted from the logits of ids in the output, once for each time that the id is there."""

    frequency_penalty: float = 0.0

    def check(self) -> None:
        if not is_float32(self.frequency_penalty):
            raise RequestError(f"frequency_penalty must be a number in float32's range; got {self.frequency_penalty!r}")

    def is_on(self) -> bool:
        return self.frequency_penalty != 0

    def changes(self, history: History) -> Changes:
        ids, counts = history.drawn
        return ids, -(counts.astype(np.float32) * np.float32(self.frequency_penalty))
