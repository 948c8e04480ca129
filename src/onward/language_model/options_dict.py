"""Written by .ci/generate.py from the declarations of options."""

from collections.abc import Callable, Mapping, Sequence, Set
from os import PathLike
from threading import Event
from typing import Any, Literal

from torch import Tensor

from onward.constraints.grammars import JsonSchema
from onward.decoding.speculation.drafter import Drafter
from onward.decoding.speculation.speculator import ModelHolder, Speculator
from onward.models.adapters.steering import Steer, Steering
from onward.models.model import Model
from onward.sampling.constraint import Constraint
from onward.sampling.options_dict import SamplingOptionsDict
from onward.tokenizer.tokenizer import Tokenizer


class GenerateOptionsDict(SamplingOptionsDict, total=False):
    """The options of `GenerateOptions` as keyword arguments, for editors and type checkers."""

    max_new_tokens: int | None
    stop: str | Sequence[str]
    reasoning_budget: int | None
    reasoning_budget_message: str | None
    time_limit: float | None
    stop_when: Callable[[Sequence[int], str], bool] | None
    cancel: Event | None
    n: int
    beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    logprobs: int | None
    prompt_logprobs: int | None
    sampling_logprobs: bool
    taps: Mapping[str, Literal["last", "new", "all"]] | None
    draft: str | ModelHolder | Model | Drafter | Speculator | None
    adapter: str | None
    steer: Mapping[str, Tensor | Steer] | str | PathLike[str] | Steering | None
    prompt_embeds: Mapping[int, Tensor] | Steering | None
    cache_salt: str | None
    json_schema: Mapping[str, Any] | bool | type | JsonSchema | None
    regex: str | None
    grammar: str | None
    choice: str | Sequence[str] | None
    constraint: Constraint | Callable[[Tokenizer | None, Set[int]], Constraint] | None
