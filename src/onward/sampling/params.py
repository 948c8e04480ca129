"""How the next token is chosen: the options, checked when they are given."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypedDict

import numpy as np
from torch import Tensor

from onward.errors import RequestError
from onward.option_names import check_option_names


class UnseededOptionsDict(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments, for editors and type checkers; all but the seed."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...]
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_sequence_breakers: int | Sequence[int]
    no_repeat_ngram_size: int
    bad_words: str | Sequence[str | Sequence[int]]
    min_new_tokens: int
    eos: int | Sequence[int] | None
    ignore_eos: bool


class SamplingOptionsDict(UnseededOptionsDict, total=False):
    """The fields of `SamplingParams` as keyword arguments, for editors and type checkers."""

    seed: int | None


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams:
    """How the next token is chosen. docs/sampling.md has the order in which the options work, and why.

    Numbers may be numpy's; ids may be lists, tuples, one-dimensional arrays or tensors.

    temperature: 0 is greedy (top_k, top_p, min_p and typical_p then change nothing); 1 is the model's own
        distribution.
    top_k: keep the k most likely ids; 0 keeps all. Ids that tie with the k-th are kept too.
    top_p: keep the smallest set of most likely ids whose probability reaches top_p, in (0, 1]; the id that
        crosses the threshold is kept, and ids that tie with it.
    min_p: keep ids at least min_p times as likely as the likeliest, in [0, 1].
    typical_p: keep the smallest set of ids of most typical surprise whose probability reaches typical_p, in (0, 1].
    xtc_probability, xtc_threshold: exclude top choices. With this probability, at each position, of the ids at
        least as probable as the threshold, in (0, 0.5], only the least probable is kept.
    repetition_penalty: above 0; divides the positive logits of ids in the prompt or the output, multiplies the
        negative ones. 1 changes nothing.
    presence_penalty, frequency_penalty: subtracted from the logits of ids in the output (not the prompt), once, and
        once for each time that the id is there.
    logit_bias: {id: what is added to its logit}; -inf bans the id.
    dry_multiplier, dry_base, dry_allowed_length, dry_sequence_breakers: "don't repeat yourself". An id that would
        extend a repetition of n ids, n at least dry_allowed_length, loses dry_multiplier * dry_base^(n -
        dry_allowed_length); repetitions do not reach across the breakers, which are ids. A multiplier of 0 is off.
    no_repeat_ngram_size: no n ids in a row occur twice in prompt and output; 0 is off.
    bad_words: sequences of ids of which none is ever completed. A text stands for its ids where there is a tokenizer.
    min_new_tokens: no id of `eos` before this many tokens. (A stop string ends the text all the same.)
    seed: a whole number in [0, 2^64); None draws one from torch's default generator.
    eos: ids that end the text, and that min_new_tokens holds back; None means the checkpoint's.
    ignore_eos: let no id end the text.

    Raises:
        RequestError: a value outside its range, or options that contradict each other.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: tuple[int, ...] = ()
    no_repeat_ngram_size: int = 0
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    seed: int | None = None
    eos: tuple[int, ...] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Users write eos=2, lists, arrays and dicts too; one form inside, which can be hashed.
        for name, value in vars(self).items():
            if type(value) not in _PYTHONS_OWN:
                self._set(name, plain(value))
        self._set("dry_sequence_breakers", as_tuple("dry_sequence_breakers", self.dry_sequence_breakers, int))
        self._set("logit_bias", _as_pairs(self.logit_bias))
        self._set("bad_words", tuple(_as_word(word) for word in as_tuple("bad_words", self.bad_words, str)))
        if self.eos is not None:
            self._set("eos", as_tuple("eos", self.eos, int))
        self._check_filters()
        self._check_penalties()
        check_seed(self.seed)
        for token in self.eos or ():
            check_whole("eos", token, low=0)
        self._check_agreement()

    def __repr__(self) -> str:
        """The options that differ from their defaults."""
        changed = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {name: value for name, value in changed.items() if value != getattr(type(self), name)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def check_length(self, max_new_tokens: int) -> None:
        """Raise `RequestError` unless a text of so many tokens at most can have min_new_tokens."""
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

    def replace(self, **options: Any) -> Self:
        """A copy with `options` changed; an unknown option raises and names those that exist."""
        check_option_names(options, vars(self))
        return type(self)(**vars(self) | options)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_filters(self) -> None:
        """NaN is outside every range."""
        if not (_is_number(self.temperature) and 0 <= self.temperature < float("inf")):
            raise RequestError(f"temperature must be a number of 0 (greedy) or more; got {self.temperature!r}")
        check_whole("top_k", self.top_k, low=0)
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError(
                f"top_p must be in (0, 1]; got {self.top_p!r} (for the most likely token alone, use top_k=1)"
            )
        if not (_is_number(self.typical_p) and 0 < self.typical_p <= 1):
            raise RequestError(f"typical_p must be in (0, 1]; got {self.typical_p!r}")
        for name in ("min_p", "xtc_probability"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value <= 1):
                raise RequestError(f"{name} must be in [0, 1]; got {value!r}")
        if not (_is_number(self.xtc_threshold) and 0 < self.xtc_threshold <= 0.5):
            raise RequestError(
                f"xtc_threshold must be in (0, 0.5]; got {self.xtc_threshold!r} (no two ids are above one half)"
            )

    def _check_penalties(self) -> None:
        if not (_is_number(self.repetition_penalty) and 0 < self.repetition_penalty < float("inf")):
            raise RequestError(f"repetition_penalty must be a number above 0; got {self.repetition_penalty!r}")
        for name, low in (("dry_multiplier", 0), ("dry_base", 1)):
            value = getattr(self, name)
            if not (_is_number(value) and low <= value < float("inf")):
                raise RequestError(f"{name} must be a number of {low} or more; got {value!r}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (_is_number(value) and abs(value) < float("inf")):
                raise RequestError(f"{name} must be a finite number; got {value!r}")
        check_whole("dry_allowed_length", self.dry_allowed_length, low=1)
        check_whole("no_repeat_ngram_size", self.no_repeat_ngram_size, low=0)
        check_whole("min_new_tokens", self.min_new_tokens, low=0)
        for token in self.dry_sequence_breakers:
            check_whole("dry_sequence_breakers", token, low=0)

    def _check_agreement(self) -> None:
        if self.xtc_probability and not self.temperature:
            raise RequestError("xtc_probability needs a temperature above 0: greedy decoding has only top choices")
        for switch, dependents in (
            ("dry_multiplier", ("dry_base", "dry_allowed_length", "dry_sequence_breakers")),
            ("xtc_probability", ("xtc_threshold",)),
        ):
            changed = [name for name in dependents if getattr(self, name) != getattr(type(self), name)]
            if changed and not getattr(self, switch):
                raise RequestError(f"{', '.join(changed)} would change nothing while {switch} is 0: give that too")


def check_seed(seed: int | None) -> None:
    if seed is None:
        return
    check_whole("seed", seed, low=0)
    if seed >= 2**64:
        raise RequestError(f"seed must be below 2^64; got {seed}")


def check_whole(name: str, value: object, *, low: int) -> None:
    """Raise `RequestError` unless `value` is an int (and no bool) of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise RequestError(f"{name} must be a whole number of {low} or more; got {value!r}")


# What almost every option is, told apart without asking torch's metaclass.
_PYTHONS_OWN = frozenset((int, float, bool, str, tuple, type(None)))
_OTHERS = (np.generic, np.ndarray, Tensor)


def plain(value: Any) -> Any:
    """numpy's scalars, arrays and tensors as Python's numbers and lists; anything else as it is."""
    if type(value) in _PYTHONS_OWN:
        return value
    return value.tolist() if isinstance(value, _OTHERS) else value


def as_tuple(name: str, value: object, single: type) -> tuple[Any, ...]:
    """One or several, as a tuple.

    Raises:
        RequestError: neither a `single` nor an iterable.
    """
    if isinstance(value, single):
        return (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be one {single.__name__} or a list of them; got {value!r}")
    return tuple(plain(item) for item in value)


def _as_pairs(bias: object) -> tuple[tuple[int, float], ...]:
    if isinstance(bias, Mapping):
        pairs: tuple[Any, ...] = tuple((plain(token), plain(value)) for token, value in bias.items())
    elif isinstance(bias, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in bias):
        pairs = bias
    else:
        raise RequestError(f"logit_bias must be a mapping of ids to numbers; got {bias!r}")
    for token, value in pairs:
        check_whole("logit_bias: an id", token, low=0)
        if not (_is_number(value) and value < float("inf")):
            raise RequestError(f"logit_bias of id {token} must be a number, or -inf to ban it; got {value!r}")
    if len({token for token, _ in pairs}) < len(pairs):
        raise RequestError("logit_bias names an id twice")
    return tuple(sorted(pairs))


def _as_word(word: object) -> str | tuple[int, ...]:
    if isinstance(word, str) and word:
        return word
    if isinstance(word, str) or not isinstance(word, Iterable):
        raise RequestError(f"bad_words must be non-empty texts or lists of ids; got {word!r}")
    ids = tuple(plain(token) for token in word)
    if not ids:
        raise RequestError("bad_words must be non-empty texts or lists of ids; got an empty list")
    for token in ids:
        check_whole("bad_words: an id", token, low=0)
    return ids


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
