"""How the next token is chosen: the options of all transforms, checked on construction."""

import copy
import dataclasses
import functools
import inspect
from dataclasses import dataclass
from typing import Any, Self, Unpack

from onward.errors import OptionError
from onward.sampling.options_dict import SamplingOptionsDict
from onward.sampling.transforms.bad_words import BadWords
from onward.sampling.transforms.dry import Dry
from onward.sampling.transforms.logit_bias import LogitBias
from onward.sampling.transforms.min_new_tokens import MinNewTokens
from onward.sampling.transforms.min_p import MinP
from onward.sampling.transforms.no_repeat_ngram import NoRepeatNgram
from onward.sampling.transforms.penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from onward.sampling.transforms.temperature import Temperature
from onward.sampling.transforms.top_k import TopK
from onward.sampling.transforms.top_p import TopP
from onward.sampling.transforms.transform import Adjustment, Filter, Transform, is_neutral, neutral_of, transforms_of
from onward.sampling.transforms.typical_p import TypicalP
from onward.sampling.transforms.xtc import Xtc
from onward.util.checks import check_whole
from onward.util.option_names import check_option_names, checks_option_names
from onward.util.options import SAMPLING, option, options_of


@checks_option_names
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

    seed: int | None = option(
        None, low=0, below=2**64, help="Random seed.", group=SAMPLING, show_default="a new one each time"
    )

    def __post_init__(self) -> None:
        options = options_of(self._kind)
        changed = [name for name, value in vars(self).items() if value is not options[name].default]
        for name in changed:
            self._set(name, options[name].normalized(getattr(self, name)))
        for kind in _checked_kinds(self._kind):
            if not neutral_of(kind).keys().isdisjoint(changed):
                kind.check(self)
        if self.xtc_probability and not self.temperature:
            raise OptionError("xtc_probability", "needs a temperature above 0: greedy decoding has only top choices")

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
            raise OptionError(
                "min_new_tokens",
                f"is {self.min_new_tokens}, but max_new_tokens is {max_new_tokens}: ask for more tokens or a smaller "
                "minimum",
            )

    def check_ids(self, vocab_size: int) -> None:
        """Raise `RequestError` if an option names an id outside the vocabulary, or a text instead of ids."""
        for kind in transforms_of(self._kind, Adjustment):
            for name, ids in () if is_neutral(kind, self) else kind.named_ids(self).items():
                if (largest := max(ids, default=0)) >= vocab_size:
                    raise OptionError(name, f"names id {largest}, but the vocabulary ends at {vocab_size - 1}")

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end the text."""
        return frozenset() if self.ignore_eos else frozenset(self.eos or ())

    def replace(self, **options: Unpack[SamplingOptionsDict]) -> Self:
        """A copy with `options` changed; an unknown option raises, with the names of all options."""
        check_option_names(options, option_names(self._kind))
        changed: dict[str, Any] = {**vars(self), **options}
        return type(self)(**changed)

    def with_values(self, **values: Any) -> Self:
        """A copy with other values, which the caller knows to be valid: they are not checked."""
        changed = copy.copy(self)
        vars(changed).update(values)
        return changed


@functools.cache
def _checked_kinds(options: type[SamplingParams]) -> tuple[type[Transform], ...]:
    kinds: list[type[Transform]] = [*transforms_of(options, Adjustment), *transforms_of(options, Filter)]
    return tuple(kind for kind in kinds if kind.check is not Transform.check)


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
