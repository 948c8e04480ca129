"""Speculators: a drafter with its measured costs and acceptance rate; and those that requests of one model share."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from onward.decoding.speculation.drafter import Drafter, DraftTarget
from onward.decoding.speculation.lookup import PromptLookup, SuffixLookup
from onward.decoding.speculation.model_drafter import ModelDrafter
from onward.decoding.speculation.pace import LENGTHS, AcceptanceRate, DraftLengthController
from onward.decoding.speculation.step import SpeculativeStep
from onward.decoding.step import DecodeStep, TokenSampler
from onward.errors import OptionError
from onward.models import Model
from onward.util.checks import check_whole
from onward.util.process import renew_in_forks
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
            f"{known}; got {draft!r}: to draft with a model, pass onward.load(name). 'mtp' and the names of "
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
        plain: DecodeStep,
        chooser: TokenSampler,
        model: Model,
        *,
        rows: int,
        max_len: int,
    ) -> SpeculativeStep:
        """The step for all sequences of a model that draft with this speculator over one cache.

        plain, chooser: as in `SpeculativeStep`. The others are those of `DraftTarget`.
        """
        positions = int(min(rows, plain.slots.stats().total / plain.slots.cost(max_len)) * max_len)
        target = DraftTarget(
            model.vocab_size, plain.device, rows, max_len, positions, self.longest, chooser.select, model
        )
        return SpeculativeStep(plain, chooser, target, self.drafter, self._pace, self._acceptance)

    @property
    def longest(self) -> int:
        """The length of the longest draft."""
        return LENGTHS[-1] if self.length is None else self.length


# The maximum number of cached speculators. Each holds what it has learned and the programs of its draft model.
_MAX_SPECULATORS = 8


class SpeculatorCache:
    """The speculators of one language model, one for each `draft`, for reuse by further requests."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Any, tuple[Any, Speculator]] = OrderedDict()
        self._lock = threading.RLock()  # requests come from several threads
        renew_in_forks(self)

    def renew(self) -> None:
        self._lock = threading.RLock()

    def get(self, draft: Any, make: Callable[[Any], Drafter] = as_drafter) -> Speculator | None:
        """The speculator for a value of `draft`. make: creates its drafter."""
        if draft is None or isinstance(draft, Speculator):
            return draft
        key = draft if isinstance(draft, str) else id(draft)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = (draft, Speculator(make(draft)))  # references `draft`, so that its id stays unique
                if len(self._entries) > _MAX_SPECULATORS:
                    self._entries.popitem(last=False)
            self._entries.move_to_end(key)
            return self._entries[key][1]
