"""Written by .ci/generate.py from the declarations of options."""

from collections.abc import Mapping, Sequence
from typing import TypedDict


class UnseededOptionsDict(TypedDict, total=False):
    """The options of `SamplingParams` but for the seed."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
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
    """The options of `SamplingParams` as keyword arguments, for editors and type checkers."""

    seed: int | None
