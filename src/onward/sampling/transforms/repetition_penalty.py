"""The repetition penalty: ids of prompt and output less likely."""

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from onward.checks import is_float32
from onward.errors import RequestError
from onward.sampling.history import History
from onward.sampling.transforms.transform import Adjustment, Changes, Entries


class RepetitionPenaltyDict(TypedDict, total=False):
    repetition_penalty: float


@dataclass(frozen=True, kw_only=True)
class RepetitionPenalty(Adjustment):
    """repetition_penalty: above 0; divides the positive logits of ids in the prompt or the output, multiplies the
    negative ones. 1 changes nothing.
    """

    repetition_penalty: float = 1.0

    def check(self) -> None:
        if not (is_float32(self.repetition_penalty) and self.repetition_penalty > 0):
            raise RequestError(f"repetition_penalty must be a number above 0; got {self.repetition_penalty!r}")

    def is_on(self) -> bool:
        return self.repetition_penalty != 1

    def changes(self, history: History) -> Changes:
        return history.seen[0], self.repetition_penalty

    @staticmethod
    def adjust(logits: Tensor, entries: Entries) -> Tensor:
        """Make ids that occurred less likely (values above 1) or more (below): logits above 0 are divided by the value,
        the others multiplied. (Keskar et al., CTRL, arXiv 1909.05858; both signs as transformers)
        """
        before = entries.read(logits)
        return entries.write(logits, torch.where(before < 0, before * entries.values, before / entries.values))
