"""What a request may ask for, checked when it is asked."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from onward.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The options of one request. docs/sampling.md has the order in which they work, and why.

    max_new_tokens: the most tokens to emit; 0 emits none.
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
    stop: strings that end the text; the text ends before the first of them.
    eos: ids that end the text; None means the checkpoint's.
    ignore_eos: let no id end the text.

    Raises:
        RequestError: a value outside its range, or options that contradict each other.
    """

    max_new_tokens: int = 128
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
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Users write stop="x" and eos=2, lists and dicts too; one form inside, which can be hashed.
        self._set("stop", _as_tuple("stop", self.stop, str))
        self._set("dry_sequence_breakers", _as_tuple("dry_sequence_breakers", self.dry_sequence_breakers, int))
        self._set("logit_bias", _as_pairs(self.logit_bias))
        self._set("bad_words", tuple(_as_word(word) for word in _as_tuple("bad_words", self.bad_words, str)))
        if self.eos is not None:
            self._set("eos", _as_tuple("eos", self.eos, int))
        check_whole("max_new_tokens", self.max_new_tokens, low=0)
        self._check_filters()
        self._check_penalties()
        check_seed(self.seed)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(f"stop must be non-empty strings; got {list(self.stop)!r}")
        for token in self.eos or ():
            check_whole("eos", token, low=0)
        self._check_agreement()

    def replace(self, **options: Any) -> Self:
        """A copy with `options` changed; an unknown option raises and names those that exist."""
        known = [field.name for field in dataclasses.fields(self)]
        if unknown := sorted(set(options) - set(known)):
            raise RequestError(f"unknown option {', '.join(map(repr, unknown))}; the options are {', '.join(known)}")
        return dataclasses.replace(self, **options)

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
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}, but max_new_tokens is {self.max_new_tokens}: ask for more "
                "tokens or a smaller minimum"
            )
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


def _as_tuple(name: str, value: object, single: type) -> tuple[Any, ...]:
    if isinstance(value, single):
        return (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be one {single.__name__} or a list of them; got {value!r}")
    return tuple(value)


def _as_pairs(bias: object) -> tuple[tuple[int, float], ...]:
    if isinstance(bias, Mapping):
        pairs: tuple[Any, ...] = tuple(bias.items())
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
    ids = tuple(word)
    if not ids:
        raise RequestError("bad_words must be non-empty texts or lists of ids; got an empty list")
    for token in ids:
        check_whole("bad_words: an id", token, low=0)
    return ids


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
