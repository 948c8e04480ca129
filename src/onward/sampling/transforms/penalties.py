"""Penalties for ids of the output, or of prompt and output."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onward.sampling.history import History
from onward.sampling.transforms.transform import Adjustment, Changes, LogitEntries
from onward.util.options import FLOAT32_MAX, REPETITION, option


@dataclass(frozen=True, kw_only=True)
class FrequencyPenalty(Adjustment):
    """frequency_penalty: subtracted from the logits of ids in the output, once per occurrence."""

    frequency_penalty: float = option(
        0.0,
        low=-FLOAT32_MAX,
        high=FLOAT32_MAX,
        help="Subtract X for each time a token was generated; 0: off.",
        group=REPETITION,
    )

    def is_on(self) -> bool:
        return self.frequency_penalty != 0

    def changes(self, history: History) -> Changes:
        ids, counts = history.drawn
        with np.errstate(over="ignore"):  # infinite: the id is banned or certain
            return ids, -(counts.astype(np.float32) * np.float32(self.frequency_penalty))


@dataclass(frozen=True, kw_only=True)
class PresencePenalty(Adjustment):
    """presence_penalty: subtracted from the logits of ids in the output (not the prompt), once."""

    presence_penalty: float = option(
        0.0,
        low=-FLOAT32_MAX,
        high=FLOAT32_MAX,
        help="Subtract X from the logits of generated tokens; 0: off.",
        group=REPETITION,
    )

    def is_on(self) -> bool:
        return self.presence_penalty != 0

    def changes(self, history: History) -> Changes:
        ids, _ = history.drawn
        return ids, -self.presence_penalty


@dataclass(frozen=True, kw_only=True)
class RepetitionPenalty(Adjustment):
    """repetition_penalty: above 0; divides the positive logits of ids in the prompt or the output, multiplies the
    negative ones. 1 changes nothing.
    """

    repetition_penalty: float = option(
        1.0, above=0, high=FLOAT32_MAX, help="Penalize tokens already in the text; 1: off.", group=REPETITION
    )

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
