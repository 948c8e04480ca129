"""The presence penalty: ids of the output less likely."""

from dataclasses import dataclass
from typing import TypedDict

from onward.checks import is_float32
from onward.errors import RequestError
from onward.sampling.history import History
from onward.sampling.transforms.transform import Adjustment, Changes


class PresencePenaltyDict(TypedDict, total=False):
    presence_penalty: float


@dataclass(frozen=True, kw_only=True)
class PresencePenalty(Adjustment):
    """presence_penalty: subtracted from the logits of ids in the output (not the prompt), once."""

    presence_penalty: float = 0.0

    def check(self) -> None:
        if not is_float32(self.presence_penalty):
            raise RequestError(f"presence_penalty must be a number in float32's range; got {self.presence_penalty!r}")

    def is_on(self) -> bool:
        return self.presence_penalty != 0

    def changes(self, history: History) -> Changes:
        ids, _ = history.drawn
        return ids, -self.presence_penalty
