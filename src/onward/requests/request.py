"""Prompts and options as users give them, checked and made into requests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onward.checkpoint import Tokenizer
from onward.errors import RequestError, TokenizerError
from onward.models import Model
from onward.requests.options import GenerateOptions
from onward.sampling import SamplingParams
from onward.sampling.params import check_whole

Ids = Sequence[int]
Prompt = str | Ids


@dataclass(frozen=True)
class Request:
    """One prompt and what was asked for it."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class RequestReader:
    """Makes requests of what users give, for one model.

    defaults: the options of a request that does not give them.
    """

    model: Model
    tokenizer: Tokenizer | None
    defaults: SamplingParams

    def read(
        self,
        prompts: Sequence[Prompt],
        options: Mapping[str, Any],
        per_prompt: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[list[Request], GenerateOptions]:
        """The requests, and what is asked of the call as a whole.

        options: the fields of `SamplingParams`, for every prompt, and of `GenerateOptions`. per_prompt: for each
        prompt the sampling parameters in which it differs.

        Raises:
            RequestError: an unknown option, a value outside its range, options that contradict each other, an empty
                prompt.
            TokenizerError: a text prompt, a stop string or a bad word, and no tokenizer.
        """
        call, common = GenerateOptions.split(options)
        if per_prompt is None:
            params = [self.params(common, call)] * len(prompts)
        else:
            params = [self.params({**common, **own}, call) for own in _checked_each(per_prompt, len(prompts))]
        return [Request(self.prompt_ids(prompt), one) for prompt, one in zip(prompts, params, strict=True)], call

    def params(self, options: Mapping[str, Any], call: GenerateOptions) -> SamplingParams:
        """The defaults with `options` in their place, as far as the model and its tokenizer can serve them."""
        params = call.defaults(self.defaults).replace(**options)
        call.check_agreement(params)
        if params.stop and self.tokenizer is None:
            raise TokenizerError("stop strings need a tokenizer, and this model has none: use eos with ids")
        if out := [token for token in params.eos or () if token >= self.model.vocab_size]:
            raise RequestError(f"eos names id {out[0]}, but the vocabulary ends at {self.model.vocab_size - 1}")
        if any(isinstance(word, str) for word in params.bad_words):
            params = params.replace(bad_words=tuple(self._word_ids(params.bad_words)))
        return params

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt; a text's with the tokenizer's own special tokens."""
        if not isinstance(prompt, str):
            ids = list(prompt)
            check_ids(ids, self.model.vocab_size)
            return ids
        ids = needed_tokenizer(self.tokenizer, "a text prompt").encode(prompt, add_special_tokens=True)
        if ids:
            return ids
        if self.tokenizer is None or self.tokenizer.bos_id is None:
            raise RequestError("the prompt is empty and this model has no BOS token to start from: give some text")
        return [self.tokenizer.bos_id]

    def _word_ids(self, words: Sequence[str | tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """Ids of banned words; a text both as it begins a line and as it stands after a space."""
        for word in words:
            if not isinstance(word, str):
                yield word
                continue
            tokenizer = needed_tokenizer(self.tokenizer, "a bad word given as text")
            written = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in (word, f" {word}"))
            yield from dict.fromkeys(ids for ids in written if ids)


def as_list(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list of them."""
    if isinstance(prompt, str):
        return [prompt], False
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(f"a prompt is a str, a list of ids, or a list of either; got {type(prompt).__name__}")
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, str | Sequence) for item in items):
        return items, True
    return [items], False


def _checked_each(per_prompt: object, prompts: int) -> list[Mapping[str, Any]]:
    if isinstance(per_prompt, str | Mapping) or not isinstance(per_prompt, Sequence):
        raise RequestError(f"per_prompt must be a list of options as dicts, one a prompt; got {per_prompt!r}")
    if len(per_prompt) != prompts:
        raise RequestError(f"per_prompt has options for {len(per_prompt)} prompts, and there are {prompts}")
    if wrong := [own for own in per_prompt if not isinstance(own, Mapping)]:
        raise RequestError(f"per_prompt must hold a dict of options for each prompt; got {wrong[0]!r}")
    return list(per_prompt)


def needed_tokenizer(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise TokenizerError(f"{what} needs a tokenizer, and this model has no tokenizer.json: give ids")
    return tokenizer


def check_ids(ids: Ids, vocab_size: int) -> None:
    if not ids:
        raise RequestError("the prompt is an empty list of ids: give at least one")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise RequestError(f"a prompt of ids wants whole numbers from 0 to {vocab_size - 1}; got {token!r}")


def check_top(name: str, count: int, vocab_size: int) -> None:
    """Raise unless so many of the likeliest ids can be reported."""
    check_whole(name, count, low=0)
    if count > vocab_size:
        raise RequestError(f"{name} is {count}, but the vocabulary has {vocab_size} ids: ask for fewer")
