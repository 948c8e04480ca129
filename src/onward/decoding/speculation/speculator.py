"""Speculators: a drafter with its measured costs and acceptance rate."""

import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from onward.decoding.cache_manager import CacheManager
from onward.decoding.speculation.drafter import Drafter, DraftTarget
from onward.decoding.speculation.lookup import PromptLookup, SuffixLookup
from onward.decoding.speculation.model_drafter import ModelDrafter
from onward.decoding.speculation.pace import LENGTHS, AcceptanceRate, DraftLengthController
from onward.decoding.speculation.step import SpeculativeStep
from onward.decoding.step import Select, Step, TokenSampler
from onward.errors import OptionError
from onward.models import Model
from onward.program import Executable
from onward.util.checks import check_whole
from onward.util.text import described

# Drafters without a model, by name.
LOOKUPS: dict[str, Callable[[], Drafter]] = {"lookup": PromptLookup, "suffix": SuffixLookup}


@runtime_checkable
class ModelHolder(Protocol):
    """Holds a model, like `LanguageModel` (which belongs to a higher layer and is not imported here)."""

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
    known = "is 'lookup', 'suffix', a LanguageModel, a Model, a Drafter or a Speculator"
    if isinstance(draft, str):
        raise OptionError(
            "draft",
            f"{known}; got {draft!r}: to draft with a model of that name, onward.load it. 'mtp' and the names of "
            "EAGLE-3 heads are for the draft= of onward.load, with their model",
        )
    raise OptionError("draft", f"{known}; got {type(draft).__name__}")


class Speculator:
    """Creates speculative steps with a drafter. The emitted ids are those of plain decoding.

    It learns costs and acceptance rates across requests, so use one for each target.

    drafter: a `Drafter`, "lookup", "suffix", a `Model` or a `LanguageModel`. The last two must have the target's
        vocabulary, which is not checked here; `draft=` compares the tokenizers of LanguageModels.
    length: the length of every draft. By default it adapts to the acceptance rate and the cost of a round, up to 15,
        and drafting stops when it does not pay (`onward.decoding.speculation.pace`).
    clock: returns seconds.

    Raises:
        RequestError: not a drafter, or a length below 1.
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
        run: Executable,
        slots: CacheManager,
        chooser: TokenSampler,
        device: torch.device,
        vocab_size: int,
        *,
        rows: int,
        max_len: int,
        select: Select | None = None,
        model: Model | None = None,
    ) -> SpeculativeStep:
        """The step for all sequences that draft with this speculator over one cache.

        plain, run, slots, chooser: as in `SpeculativeStep`. The others are those of `DraftTarget`.
        """
        positions = min(rows, slots.stats().total / slots.cost(max_len)) * max_len
        target = DraftTarget(vocab_size, device, rows, max_len, int(positions), self.longest, select, model)
        return SpeculativeStep(plain, run, slots, chooser, target, self.drafter, self._pace, self._acceptance)

    @property
    def longest(self) -> int:
        """The length of the longest draft."""
        return LENGTHS[-1] if self.length is None else self.length
