"""How the next token is chosen: the options of all transforms, checked on construction."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, Unpack

from onward.errors import RequestError
from onward.sampling.transforms.bad_words import BadWords, BadWordsDict
from onward.sampling.transforms.dry import Dry, DryDict
from onward.sampling.transforms.logit_bias import LogitBias, LogitBiasDict
from onward.sampling.transforms.min_new_tokens import MinNewTokens, MinNewTokensDict
from onward.sampling.transforms.min_p import MinP, MinPDict
from onward.sampling.transforms.no_repeat_ngram import NoRepeatNgram, NoRepeatNgramDict
from onward.sampling.transforms.penalties import (
    FrequencyPenalty,
    FrequencyPenaltyDict,
    PresencePenalty,
    PresencePenaltyDict,
    RepetitionPenalty,
    RepetitionPenaltyDict,
)
from onward.sampling.transforms.temperature import Temperature, TemperatureDict
from onward.sampling.transforms.top_k import TopK, TopKDict
from onward.sampling.transforms.top_p import TopP, TopPDict
from onward.sampling.transforms.transform import Adjustment, Filter, transforms_of
from onward.sampling.transforms.typical_p import TypicalP, TypicalPDict
from onward.sampling.transforms.xtc import Xtc, XtcDict
from onward.util.checks import BUILTIN_TYPES, check_whole, plain
from onward.util.option_names import check_option_names
from onward.util.text_input import check_value


class UnseededOptionsDict(
    LogitBiasDict,
    RepetitionPenaltyDict,
    PresencePenaltyDict,
    FrequencyPenaltyDict,
    DryDict,
    NoRepeatNgramDict,
    BadWordsDict,
    MinNewTokensDict,
    TemperatureDict,
    TopKDict,
    TopPDict,
    MinPDict,
    TypicalPDict,
    XtcDict,
    total=False,
):
    """The fields of `SamplingParams` as keyword arguments, for editors and type checkers; all but the seed."""


class SamplingOptionsDict(UnseededOptionsDict, total=False):
    """The fields of `SamplingParams` as keyword arguments, for editors and type checkers."""

    seed: int | None


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams(
    # In the order in which they are applied.
    LogitBias,
    RepetitionPenalty,
    PresencePenalty,
    FrequencyPenalty,
    Dry,
    NoRepeatNgram,
    BadWords,
    MinNewTokens,
    Temperature,
    TopK,
    TopP,
    MinP,
    TypicalP,
    Xtc,
):
    """How the next token is chosen: the options of every transform, and the seed.

    docs/sampling.md explains the order of the transforms. Numbers may be numpy's; ids may be lists, tuples,
    one-dimensional arrays or tensors.

    seed: a whole number in [0, 2^64); None draws one from torch's default generator.

    Raises:
        RequestError: a value outside its range, or options that contradict each other.
    """

    seed: int | None = None

    def __post_init__(self) -> None:
        # Users also write eos=2, lists, arrays and dicts; convert them to one hashable form.
        for name, value in vars(self).items():
            kind = type(value)
            if kind not in BUILTIN_TYPES:
                value = plain(value)
                self._set(name, value)
                check_value(value, name)
            elif (kind is int and value.bit_length() > 64) or kind is str or (kind is tuple and value):
                check_value(value, name)
        for check in _checks(self._kind):
            check(self)
        check_seed(self.seed)
        if self.xtc_probability and not self.temperature:
            raise RequestError("xtc_probability needs a temperature above 0: greedy decoding has only top choices")

    @property
    def _kind(self) -> Any:  # mypy takes a dataclass's own hash for its class's
        return type(self)

    def __repr__(self) -> str:
        """The options that differ from their defaults."""
        changed = {name: getattr(self, name) for name in option_names(self._kind)}
        changed = {name: value for name, value in changed.items() if value != getattr(type(self), name)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def check_length(self, max_new_tokens: int) -> None:
        """Raise `RequestError` if min_new_tokens is more than `max_new_tokens`."""
        check_whole("max_new_tokens", max_new_tokens, low=0)
        if self.min_new_tokens > max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}, but max_new_tokens is {max_new_tokens}: ask for more tokens "
                "or a smaller minimum"
            )

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end the text."""
        return frozenset() if self.ignore_eos else frozenset(self.eos or ())

    def replace(self, **options: Unpack[SamplingOptionsDict]) -> Self:
        """A copy with `options` changed; an unknown option raises, with the names of all options."""
        check_option_names(options, option_names(self._kind))
        changed: dict[str, Any] = {**vars(self), **options}
        return type(self)(**changed)


@functools.cache
def _checks(options: type[SamplingParams]) -> tuple[Callable[[Any], None], ...]:
    return tuple(kind.check for kind in (*transforms_of(options, Adjustment), *transforms_of(options, Filter)))


@functools.cache
def option_names(options: type[SamplingParams]) -> tuple[str, ...]:
    """Filters first, since most people set these; a dataclass has the fields of its last base first."""
    kinds = [*transforms_of(options, Filter), *transforms_of(options, Adjustment)]
    names = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    return tuple(dict.fromkeys([*names, *(field.name for field in dataclasses.fields(options))]))


# For `help(SamplingParams)`: the options of each transform.
SamplingParams.__doc__ = "\n".join(
    inspect.cleandoc(kind.__doc__)
    for kind in (SamplingParams, *transforms_of(SamplingParams, Filter), *transforms_of(SamplingParams, Adjustment))
    if kind.__doc__
)


def check_seed(seed: int | None) -> None:
    if seed is None:
        return
    check_whole("seed", seed, low=0)
    if seed >= 2**64:
        raise RequestError(f"seed must be below 2^64; got {seed}")
