"""A drafter with its verifier, and what they have learnt of costs and acceptance."""

import time
from collections import abc
from collections.abc import Callable
from typing import Literal

import torch

from onward.checks import check_whole
from onward.decoding import Chooser, SamplingChooser, Select, Sequence, Slots, Step
from onward.decoding.choose import constraints_of, histories_of, sampling_of
from onward.decoding.forward import Run
from onward.errors import RequestError
from onward.models import Model
from onward.reprs import described
from onward.sampling import Sampler
from onward.speculation.drafter import Drafter, DraftRequest
from onward.speculation.drafters import ModelHolder, as_drafter
from onward.speculation.pace import LENGTHS, Acceptance, Pace
from onward.speculation.step import DraftedText, DraftedTogether, SpeculativeStep
from onward.speculation.verify import Verifier, coupled, rejection

_VERIFIERS: dict[str, Verifier] = {"coupled": coupled, "rejection": rejection}
# The length of drafts for the accept/resample rule. It is fixed, for the ids depend on it.
_FIXED_LENGTH = 4


class Speculator:
    """A drafter with a verifier: makes a `SpeculativeStep`, for the sequences that join.

    It keeps what it learns of costs and acceptance for further requests, so use one for each target.

    drafter: a `Drafter`, "lookup", "suffix", a `Model` or a `LanguageModel`. The ids of the last two must mean the same
        as the target's. This is not checked here; `draft=` compares the tokenizers of LanguageModels.
    length: how many ids every draft has. By default the length adapts to what is accepted and to the cost of a round,
        up to 15 ids, and drafting stops where it does not pay (`onward.speculation.pace`).
    verifier: "coupled" emits the ids of plain decoding, whatever is drafted. "rejection" is the accept/resample rule.
        Its ids have the distribution of plain decoding, but they are other ids and depend on the drafts. So its length
        is fixed, 4 by default.
    clock: returns seconds.

    Raises:
        RequestError: what is no drafter, an unknown verifier, or a length below 1.
    """

    def __init__(
        self,
        drafter: "Drafter | Model | ModelHolder | str",
        *,
        length: int | None = None,
        verifier: Literal["coupled", "rejection"] = "coupled",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if verifier not in _VERIFIERS:
            raise RequestError(f"verifier must be one of {', '.join(_VERIFIERS)}; got {verifier!r}")
        if length is not None:
            check_whole("length", length, low=1)
        elif verifier == "rejection":
            length = _FIXED_LENGTH
        self.drafter = as_drafter(drafter)
        self.length = length
        self.verifier = verifier
        self._clock = clock
        self._acceptance = Acceptance()
        self._pace = None if length is not None else Pace()

    def __repr__(self) -> str:
        length = "adaptive" if self.length is None else str(self.length)
        return described(self, type(self.drafter).__name__, f"length {length}", self.verifier)

    def step(
        self,
        plain: Step,
        run: Run,
        slots: Slots,
        chooser: Chooser,
        device: torch.device,
        vocab_size: int | None = None,
    ) -> SpeculativeStep:
        """The step of sequences that have joined.

        plain: the step that processes prompts. run, slots, chooser, device: as in `DecodeStep`. vocab_size: V of the
        logits, for constraints of the user's.

        Raises:
            RequestError: the verifier is "rejection" and the chooser does not sample, so there is no distribution.
        """
        if self.verifier == "rejection" and not isinstance(chooser, SamplingChooser):
            raise RequestError("the verifier 'rejection' needs a Sampler, for its distribution: use 'coupled'")
        return SpeculativeStep(
            plain,
            run,
            slots,
            chooser,
            device,
            verifier=_VERIFIERS[self.verifier],
            longest=self.longest,
            pace=self._pace,
            acceptance=self._acceptance,
            vocab_size=vocab_size,
            clock=self._clock,
        )

    def join(
        self,
        sequences: abc.Sequence[Sequence],
        vocab_size: int,
        device: torch.device,
        select: Select | None = None,
        max_len: int | None = None,
    ) -> None:
        """Draft for these sequences together.

        Args:
            vocab_size: V of the logits. device: where tokens go.
            select: chooses the target's tokens, where the sequences do not say how.
            max_len: the most positions that a text takes; by default those of the longest.
        """
        histories = None
        if select is None:
            sampler = Sampler([sampling_of(sequence) for sequence in sequences], device)
            histories = histories_of(sampler, sequences)
        request = DraftRequest(
            rows=len(sequences),
            max_len=max(sequence.longest for sequence in sequences) if max_len is None else max_len,
            longest=self.longest,
            vocab_size=vocab_size,
            select=sampler if select is None else select,
            histories=histories,
            constraints=constraints_of(sequences),
            probabilities=self.verifier == "rejection",
            device=device,
        )
        group = DraftedTogether(self.drafter, request)
        for owner, sequence in enumerate(sequences):
            sequence.drafting = DraftedText(group, owner, Acceptance(self._acceptance.rate))

    @property
    def longest(self) -> int:
        """The most ids of a draft."""
        return LENGTHS[-1] if self.length is None else self.length
