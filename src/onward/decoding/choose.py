"""Choosing the next id of several sequences at once."""

import weakref
from collections import abc
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from onward.decoding.sequence import Sequence
from onward.program import Pick
from onward.sampling import ConstrainedText, History, Sampler, SamplingParams

# (logits [B, V], positions int32 [B] of the tokens to choose) -> int64 [B]
Select = Callable[[Tensor, Tensor], Tensor]


class Chooser(Protocol):
    """Chooses the next id of sequences from their logits."""

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        sequences: abc.Sequence[Sequence],
        drafts: abc.Sequence[abc.Sequence[int]] | None = None,
    ) -> Tensor:
        """float [B, V] and int [B], the positions of the ids to choose, of B sequences -> ids int64 [B].

        For K places a sequence: [B, K, V] and [B, K] -> [B, K]. The id at place k is chosen as if the first k ids of
        the sequence's draft had been.
        """
        ...

    def kernel(self, sequences: abc.Sequence[Sequence]) -> Pick | None:
        """The kernel that does it for these sequences; None where none does."""
        ...


class SamplingChooser:
    """Chooses as each sequence's own `sampling` says, from its own history. device: where the logits are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[list[weakref.ref[Sequence]], Sampler] | None = None

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        sequences: abc.Sequence[Sequence],
        drafts: abc.Sequence[abc.Sequence[int]] | None = None,
    ) -> Tensor:
        sampler = self.sampler(sequences)
        return sampler(logits, positions, histories_of(sampler, sequences), drafts, constraints_of(sequences))

    def sampler(self, sequences: abc.Sequence[Sequence]) -> Sampler:
        """The sampler of these sequences. The last one is kept, because most steps are of the same sequences."""
        last = self._last
        if last is not None and [sequence() for sequence in last[0]] == list(sequences):
            return last[1]
        sampler = Sampler([sampling_of(sequence) for sequence in sequences], self._device)
        # A chooser lives as long as its engine, and must not keep anything of a sequence that has ended.
        self._last = [weakref.ref(sequence, self._forget) for sequence in sequences], sampler
        return sampler

    def _forget(self, sequence: "weakref.ref[Sequence]") -> None:
        last = self._last
        if last is not None and sequence in last[0]:
            self._last = None

    def kernel(self, sequences: abc.Sequence[Sequence]) -> Pick | None:
        return self.sampler(sequences).pick if constraints_of(sequences) is None else None


class SelectChooser:
    """Chooses with a function of logits and positions that is the same for all sequences.

    select: may have an attribute `pick`, the kernel that does it.
    """

    def __init__(self, select: Select) -> None:
        self._select = select
        self._kernel: Pick | None = getattr(select, "pick", None)

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        sequences: abc.Sequence[Sequence],
        drafts: abc.Sequence[abc.Sequence[int]] | None = None,
    ) -> Tensor:
        assert drafts is None, "a function chooses at one place at a time"
        return self._select(logits, positions)

    def kernel(self, sequences: abc.Sequence[Sequence]) -> Pick | None:
        return self._kernel


def histories_of(sampler: Sampler, sequences: abc.Sequence[Sequence]) -> list[History] | None:
    """The histories of sequences; None where the sampler reads none."""
    return [sequence.read_history() for sequence in sequences] if sampler.needs_history else None


def constraints_of(sequences: abc.Sequence[Sequence]) -> list[ConstrainedText | None] | None:
    """The constraints of sequences; None where none has any."""
    constraints = [sequence.constraint for sequence in sequences]
    return constraints if any(constraint is not None for constraint in constraints) else None


def sampling_of(sequence: Sequence) -> SamplingParams:
    """How a sequence's tokens are chosen."""
    assert sequence.sampling is not None, "a sequence without sampling wants a SelectChooser"
    return sequence.sampling
