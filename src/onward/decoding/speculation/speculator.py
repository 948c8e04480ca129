"""A drafter, with what was learnt of its costs and acceptance."""

import time
from collections import abc
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from onward.decoding.batch import Run
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.decoding.speculation.drafter import Drafter, DraftRequest
from onward.decoding.speculation.lookup import PromptLookup
from onward.decoding.speculation.model_drafter import ModelDrafter
from onward.decoding.speculation.pace import LENGTHS, AcceptanceRate, DraftLengthController
from onward.decoding.speculation.step import DraftGroup, DraftState, SpeculativeStep
from onward.decoding.speculation.suffix import SuffixLookup
from onward.decoding.step import Select, Step, TokenSampler, constraints_of, histories_of, sampling_of
from onward.errors import RequestError
from onward.models import Model
from onward.sampling import Sampler
from onward.util.checks import check_whole
from onward.util.text import described

# Drafters that need no model, by name.
LOOKUPS: dict[str, Callable[[], Drafter]] = {"lookup": PromptLookup, "suffix": SuffixLookup}


@runtime_checkable
class ModelHolder(Protocol):
    """Holds a model to decode with, as a `LanguageModel` does. (That class is of a layer above and is not imported.)"""

    @property
    def model(self) -> Model: ...

    prefill_chunk: int


def as_drafter(draft: Any) -> Drafter:
    """The drafter for "lookup", "suffix", a `LanguageModel`, a `Model` or a `Drafter`.

    Raises:
        RequestError: anything else.
    """
    if isinstance(draft, str) and draft in LOOKUPS:
        return LOOKUPS[draft]()
    if isinstance(draft, Model):
        return ModelDrafter(draft)
    if isinstance(draft, Drafter) and not isinstance(draft, type):
        return draft
    if isinstance(draft, ModelHolder) and isinstance(draft.model, Model):
        return ModelDrafter(draft.model, chunk=draft.prefill_chunk)
    known = "draft is 'lookup', 'suffix', a LanguageModel, a Model, a Drafter or a Speculator"
    if isinstance(draft, str):
        raise RequestError(f"{known}; got {draft!r}: to draft with a model of that name, onward.load it")
    raise RequestError(f"{known}; got {type(draft).__name__}")


class Speculator:
    """Makes a `SpeculativeStep` with a drafter, for the sequences that join. The ids are those of plain decoding.

    It keeps what it learns of costs and acceptance for further requests, so use one for each target.

    drafter: a `Drafter`, "lookup", "suffix", a `Model` or a `LanguageModel`. The ids of the last two must mean the same
        as the target's. This is not checked here; `draft=` compares the tokenizers of LanguageModels.
    length: how many ids every draft has. By default the length adapts to what is accepted and to the cost of a round,
        up to 15 ids, and drafting stops where it does not pay (`onward.decoding.speculation.pace`).
    clock: returns seconds.

    Raises:
        RequestError: what is no drafter, or a length below 1.
    """

    def __init__(
        self,
        drafter: "Drafter | Model | ModelHolder | str",
        *,
        length: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if length is not None:
            check_whole("length", length, low=1)
        self.drafter = as_drafter(drafter)
        self.length = length
        self._acceptance = AcceptanceRate()
        self._pace = None if length is not None else DraftLengthController(clock)

    def __repr__(self) -> str:
        length = "adaptive" if self.length is None else str(self.length)
        return described(self, type(self.drafter).__name__, f"length {length}")

    def step(
        self,
        plain: Step,
        run: Run,
        slots: CacheManager,
        chooser: TokenSampler,
        device: torch.device,
        vocab_size: int | None = None,
    ) -> SpeculativeStep:
        """The step of sequences that have joined.

        plain: the step that processes prompts. run, slots, chooser, device: as in `DecodeStep`. vocab_size: V of the
        logits, for constraints of the user's.
        """
        return SpeculativeStep(
            plain,
            run,
            slots,
            chooser,
            device,
            longest=self.longest,
            pace=self._pace,
            acceptance=self._acceptance,
            vocab_size=vocab_size,
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
            device=device,
        )
        group = DraftGroup(self.drafter, request)
        for owner, sequence in enumerate(sequences):
            sequence.drafting = DraftState(group, owner, AcceptanceRate(self._acceptance.rate))

    @property
    def longest(self) -> int:
        """The most ids of a draft."""
        return LENGTHS[-1] if self.length is None else self.length
