"""Penalties for ids of the output, or of prompt and output."""

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from onward.errors import RequestError
from onward.sampling.history import History
from onward.sampling.transforms.transform import Adjustment, Changes, LogitEntries
from onward.util.checks import is_float32


class FrequencyPenaltyDict(TypedDict, total=False):
    frequency_penalty: float


@dataclass(frozen=True, kw_only=True)
class FrequencyPenalty(Adjustment):
    """frequency_penalty: subtracted from the logits of ids in the output, once per occurrence."""

    frequency_penalty: float = 0.0

    def check(self) -> None:
        if not is_float32(self.frequency_penalty):
            raise RequestError(f"frequency_penalty must be a number in float32's range; got {self.frequency_penalty!r}")

    def is_on(self) -> bool:
        return self.frequency_penalty != 0

    def changes(self, history: History) -> Changes:
        ids, counts = history.drawn
        return ids, -(counts.astype(np.float32) * np.float32(self.frequency_penalty))


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
    def adjust(logits: Tensor, entries: LogitEntries) -> Tensor:
        """Divide logits above 0 by the value, multiply the others (Keskar et al., CTRL, arXiv 1909.05858; both signs as
        in transformers)."""
        before = entries.read(logits)
        return entries.write(logits, torch.where(before < 0, before * entries.values, before / entries.values))
