"""What a request may ask for, checked when it is asked."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from onward.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The options of one request.

    max_new_tokens: the most tokens to emit; 0 emits none.
    temperature: 0 is greedy (the filters below then change nothing); 1 is the model's own distribution.
    top_k: keep the k most likely ids; 0 keeps all. Ids that tie with the k-th are kept too.
    top_p: keep the smallest set of most likely ids whose probability reaches top_p, in (0, 1]; the id that
        crosses the threshold is kept, and ids that tie with it.
    min_p: keep ids at least min_p times as likely as the likeliest, in [0, 1].
    seed: a whole number in [0, 2^64); None draws one from torch's default generator.
    stop: strings that end the text; the text ends before the first of them.
    eos: ids that end the text; None means the checkpoint's.
    ignore_eos: let no id end the text.

    Raises:
        RequestError: a value outside its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Users write stop="x" and eos=2, lists too; one form inside.
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop, str))
        if self.eos is not None:
            object.__setattr__(self, "eos", _as_tuple("eos", self.eos, int))
        check_whole("max_new_tokens", self.max_new_tokens, low=0)
        check_filters(self.temperature, self.top_k, self.top_p, self.min_p)
        check_seed(self.seed)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(f"stop must be non-empty strings; got {list(self.stop)!r}")
        for token in self.eos or ():
            check_whole("eos", token, low=0)

    def replace(self, **options: Any) -> Self:
        """A copy with `options` changed; an unknown option raises and names those that exist."""
        known = [field.name for field in dataclasses.fields(self)]
        if unknown := sorted(set(options) - set(known)):
            raise RequestError(f"unknown option {', '.join(map(repr, unknown))}; the options are {', '.join(known)}")
        return dataclasses.replace(self, **options)


def check_filters(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Raise `RequestError` for a filter outside its range (NaN is outside every range)."""
    if not (_is_number(temperature) and 0 <= temperature < float("inf")):
        raise RequestError(f"temperature must be a number of 0 (greedy) or more; got {temperature!r}")
    check_whole("top_k", top_k, low=0)
    if not (_is_number(top_p) and 0 < top_p <= 1):
        raise RequestError(f"top_p must be in (0, 1]; got {top_p!r} (for the most likely token alone, use top_k=1)")
    if not (_is_number(min_p) and 0 <= min_p <= 1):
        raise RequestError(f"min_p must be in [0, 1]; got {min_p!r}")


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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
