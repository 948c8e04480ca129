"""Makes a drafter of what users pass as `draft`."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from onward.errors import RequestError
from onward.models import Model
from onward.speculation.drafter import Drafter
from onward.speculation.lookup import PromptLookup
from onward.speculation.model_drafter import ModelDrafter
from onward.speculation.suffix import SuffixLookup

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
