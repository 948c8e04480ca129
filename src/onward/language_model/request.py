"""Requests, made and validated from prompts and options."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from onward.cache import length_of
from onward.chat import AnswerFormat
from onward.constraints import Grammar
from onward.decoding.prompt import check_context_length
from onward.decoding.shared_cache import PinnedPrefix
from onward.decoding.speculation import Speculator
from onward.errors import ContextOverflowError, OptionError, RequestError, TokenizerError, blaming
from onward.language_model.options import GenerateOptions, option_names
from onward.language_model.options_dict import GenerateOptionsDict
from onward.language_model.tapped import check_capture
from onward.models import Cache, Model
from onward.models.adapters import Adapters
from onward.tokenizer import TextLengths, Tokenizer
from onward.util.checks import check_whole, plain, plain_items
from onward.util.option_names import check_option_names
from onward.util.options import options_of
from onward.util.text import brief, brief_list
from onward.util.text_input import check_value

_SEED = options_of(GenerateOptions)["seed"]

# Ids: a list or a tuple, or one dimension of an array or a tensor of whole numbers.
Ids: TypeAlias = Sequence[int] | NDArray[Any] | Tensor


@dataclass(frozen=True)
class Request:
    """One prompt and its options. `LanguageModel.request` makes one and validates it for the model.

    prompt: ids, at least one.
    options: all options of the request; a model's defaults do not apply.
    answer: in a chat, the format of the answer.
    pooling: makes the embedding, or the score, of the result's values at taps.
    """

    prompt: tuple[int, ...]
    options: GenerateOptions = field(default_factory=GenerateOptions)
    answer: AnswerFormat | None = None
    pooling: Callable[[Mapping[str, Tensor]], Tensor] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", tuple(_as_ids(self.prompt)))

    def __repr__(self) -> str:
        return f"Request({brief_list(self.prompt)}, {self.options!r})"

    @property
    def longest(self) -> int:
        """The most positions of a text: the prompt and all new tokens."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def max_new_tokens(self) -> int:
        """The maximum number of tokens to emit. `LanguageModel.request` has replaced None by a number."""
        assert self.options.max_new_tokens is not None, "a running request has been validated"
        return self.options.max_new_tokens

    def replace(self, **options: Unpack[GenerateOptionsDict]) -> Self:
        """The same prompt with `options` changed, as in `GenerateOptions.replace`."""
        return dataclasses.replace(self, options=self.options.replace(**options))

    def with_seed(self, seed: int) -> Self:
        """`replace(seed=seed)`, which validates the seed alone."""
        return dataclasses.replace(self, options=self.options.with_values(seed=_SEED.normalized(seed)))


Prompt: TypeAlias = str | Ids | Request


@dataclass(frozen=True)
class RequestReader:
    """Makes and validates requests for one model.

    defaults, draft: for requests that don't set these options. speculator: makes a speculator from a `draft` option.
    adapters: the loaded ones.
    """

    model: Model
    tokenizer: Tokenizer | None
    defaults: GenerateOptions
    draft: Speculator | None
    speculator: Callable[[Any], Speculator | None]
    adapters: Adapters

    def read(
        self,
        prompts: Sequence[Prompt],
        options: Mapping[str, Any],
        per_prompt: Sequence[Mapping[str, Any]] | None = None,
        cache: Cache | PinnedPrefix | None = None,
        *,
        one_text: bool = False,
        answer: AnswerFormat | None = None,
    ) -> list[Request]:
        """Make a request for each prompt. The errors are those of `LanguageModel.generate`.

        options: for all prompts. per_prompt: those that differ between prompts. cache: the caller's.
        one_text: ignore defaults of beams or several texts, as sessions do. answer: the format of a chat's answer.
        """
        check_option_names(options, option_names())
        each: Sequence[Mapping[str, Any]] = [{}] * len(prompts)
        if per_prompt is not None:
            each = _checked_per_prompt(per_prompt, len(prompts))
        alone: dict[str, Any] = {"n": 1, "beams": 1} if one_text or isinstance(cache, PinnedPrefix) else {}
        return [
            self._read(prompt, {**({} if isinstance(prompt, Request) else alone), **options, **own}, cache, answer)
            for prompt, own in zip(prompts, each, strict=True)
        ]

    def _read(
        self,
        prompt: Prompt,
        options: Mapping[str, Any],
        cache: Cache | PinnedPrefix | None,
        answer: AnswerFormat | None,
    ) -> Request:
        base = prompt.options if isinstance(prompt, Request) else self.defaults
        answer = prompt.answer if isinstance(prompt, Request) else answer
        changes = {**options, **self._own_draft(prompt, base, options)}
        if answer is None and base.reasoning_budget is not None:  # a default for chats
            changes = {"reasoning_budget": None, **changes}
        chosen = base.replace(**changes) if changes else base  # a request's own options are valid
        if isinstance(prompt, str):
            check_length(prompt, self.tokenizer, self.model.max_seq_len)
        with blaming("prompt"):
            ids = self.prompt_ids(prompt.prompt if isinstance(prompt, Request) else prompt)
        if answer is None and chosen.reasoning_budget is not None:
            problem = "needs a chat, whose template shows where reasoning begins: leave it out, or use chat"
            raise OptionError("reasoning_budget", problem)
        served = self._served(chosen, len(ids), None if cache is None else length_of(cache))
        if isinstance(served.constrained_by, Grammar) or served.reasoning_budget is not None:
            served.new_constraint(self.tokenizer, answer)  # compile it now: the result is cached
        return Request(tuple(ids), served, answer, prompt.pooling if isinstance(prompt, Request) else None)

    def _own_draft(
        self, prompt: Prompt, base: GenerateOptions, options: Mapping[str, Any]
    ) -> dict[str, Speculator | None]:
        """The speculator of a prompt: that of its options, the request's own, or the model's. Beams have none unless
        the options ask for one."""
        if "draft" in options:
            with blaming("draft"):
                return {"draft": self.speculator(options["draft"])}
        if plain(options.get("beams", base.beams)) != 1:
            return {"draft": None}
        return {} if isinstance(prompt, Request) else {"draft": self.draft}

    def _served(self, options: GenerateOptions, prompt_len: int, cache_len: int | None) -> GenerateOptions:
        """Validate the options for the model and its tokenizer, with ids instead of words and a max_new_tokens."""
        if options.adapter is not None:
            with blaming("adapter"):
                self.adapters.find(options.adapter)
        context, vocab_size = self.model.max_seq_len, self.model.vocab_size
        if options.max_new_tokens != 0 or options.prompt_logprobs is not None:
            self.model.check_head()
        if options.stop and self.tokenizer is None:
            raise TokenizerError("stop strings need a tokenizer, but this model has none: use eos with ids")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(options, name) is not None:
                check_top(name, getattr(options, name), vocab_size)
        changes: dict[str, Any] = {}
        if any(isinstance(word, str) for word in options.bad_words):
            with blaming("bad_words"):
                changes["bad_words"] = tuple(self._word_ids(options.bad_words))
        if options.max_new_tokens is None:
            limits = [limit for limit in (context, cache_len) if limit is not None]
            if not limits:
                raise RequestError(
                    "max_new_tokens=None generates to the end of the context, but this model has no max_seq_len: "
                    "give a number",
                    option="max_new_tokens",
                )
            new = changes["max_new_tokens"] = max(0, min(limits) - prompt_len)
            changes["min_new_tokens"] = min(options.min_new_tokens, new)
        options = options.with_values(**changes) if changes else options
        options.check_ids(vocab_size)
        check_context_length(prompt_len, options.max_new_tokens or 0, context=context, cache=cache_len)
        if options.taps is not None:
            check_capture(self.model, options.taps, prompt_len, options.max_new_tokens or 0, options.rows)
        if (steering := options.steering) is not None:
            steering.check(self.model)
            lengths = {"steer": prompt_len + (options.max_new_tokens or 0), "prompt_embeds": prompt_len}
            each = {name: getattr(options, name) for name in lengths}
            placed = {name: x.placed(prompt_len, lengths[name]) for name, x in each.items() if x is not None}
            options = options.with_values(**placed)
        return options

    def continuation_ids(self, texts: Sequence[str | Ids]) -> list[list[int]]:
        """The ids of texts, which are encoded without special tokens."""
        return [
            needed_tokenizer(self.tokenizer, "a text prompt").encode(each, add_special_tokens=False)
            if isinstance(each, str)
            else self.prompt_ids(each)
            for each in texts
        ]

    def ids_to_score(self, texts: Sequence[Prompt], adapter: str | None) -> list[list[int]]:
        """The ids of texts. A `Request` must have the same adapter."""
        for text in texts:
            if isinstance(text, Request) and text.options.adapter != adapter:
                raise RequestError(
                    f"the text to score is a request with adapter={text.options.adapter!r}, but the call has "
                    f"adapter={adapter!r}: they must be equal",
                    option="adapter",
                )
        return [self.prompt_ids(text.prompt if isinstance(text, Request) else text) for text in texts]

    def prompt_ids(self, prompt: str | Ids) -> list[int]:
        """The ids of a prompt. A text is encoded with the tokenizer's special tokens."""
        if not isinstance(prompt, str):
            return checked_ids(prompt, self.model.vocab_size)
        check_value(prompt, "prompt")
        ids = needed_tokenizer(self.tokenizer, "a text prompt").encode(prompt, add_special_tokens=True)
        if ids:
            return ids
        if self.tokenizer is None or self.tokenizer.bos_id is None:
            raise RequestError("the prompt is empty and this model has no BOS token to start from: give some text")
        return [self.tokenizer.bos_id]

    def _word_ids(self, words: Sequence[str | tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """The ids of banned words. Each text is encoded twice: at the beginning of a line and after a space."""
        for word in words:
            if not isinstance(word, str):
                yield word
                continue
            tokenizer = needed_tokenizer(self.tokenizer, "a bad word given as text")
            forms = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in (word, f" {word}"))
            yield from dict.fromkeys(ids for ids in forms if ids)


def as_list(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether the argument was a list of prompts."""
    if isinstance(prompt, str | Request | np.ndarray | Tensor):
        return [prompt], False
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(
            f"a prompt is a str, ids (a list, or one dimension of an array or tensor), or a Request; or a list of "
            f"those; got {type(prompt).__name__}",
            option="prompt",
        )
    items: list[Any] = list(prompt)
    if items and all(_is_prompt(item) for item in items):
        return items, True
    return [items], False


def one_prompt(prompt: Prompt, taker: str, advice: str = "use generate for several") -> Prompt:
    """Reject a list of prompts. taker: the subject of the error message."""
    prompts, is_batch = as_list(prompt)
    if is_batch:
        raise RequestError(f"{taker} takes one prompt; got a list of {len(prompts)}: {advice}", "prompt")
    return prompts[0]


def _is_prompt(item: Any) -> bool:
    return item.ndim > 0 if isinstance(item, np.ndarray | Tensor) else isinstance(item, str | Sequence | Request)


def _checked_per_prompt(per_prompt: object, prompts: int) -> list[Mapping[str, Any]]:
    if isinstance(per_prompt, str | Mapping) or not isinstance(per_prompt, Sequence):
        raise OptionError("per_prompt", f"must be a list of options as dicts, one per prompt; got {per_prompt!r}")
    if len(per_prompt) != prompts:
        raise OptionError("per_prompt", f"has options for {len(per_prompt)} prompts, but there are {prompts}")
    if wrong := [own for own in per_prompt if not isinstance(own, Mapping)]:
        raise OptionError("per_prompt", f"must hold a dict of options for each prompt; got {wrong[0]!r}")
    for own in per_prompt:
        check_option_names(own, option_names())
    return list(per_prompt)


def needed_tokenizer(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise TokenizerError(f"{what} needs a tokenizer, but this model has no tokenizer.json: give ids")
    return tokenizer


def check_length(text: str, tokenizer: Tokenizer | None, context: int | None, option: str = "prompt") -> None:
    """Raise `ContextOverflowError` for a text whose length alone shows that it exceeds the context. option: that it is
    the value of."""
    if context is None or len(text) <= context or not isinstance(tokenizer, TextLengths):
        return
    if (tokens := tokenizer.least_tokens(text)) > context:
        raise ContextOverflowError(
            f"{option} has {len(text):,} characters, which is at least {tokens:,} tokens, but the context holds "
            f"{context:,}: shorten it",
            option,
        )


def checked_ids(ids: Ids, vocab_size: int) -> list[int]:
    """The ids of a prompt as a list. Raises `RequestError` for an empty list and for other values than the vocabulary's
    ids."""
    listed = _as_ids(ids)
    for token in listed:
        if not _is_id(token, vocab_size):
            hint = ": messages are for chat" if isinstance(token, Mapping) else ""
            raise RequestError(
                f"a prompt of ids must hold whole numbers from 0 to {vocab_size - 1}; got {brief(token)}{hint}"
            )
    return listed


def _is_id(token: object, vocab_size: int) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size


def _as_ids(ids: Ids) -> list[int]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise RequestError(
            f"ids are a list, or one dimension of an array or tensor; got {type(ids).__name__} (encode takes a text)"
        )
    if isinstance(ids, np.ndarray | Tensor) and ids.ndim != 1:
        raise RequestError(
            f"a prompt of ids has one dimension; got an array of shape {list(ids.shape)}: give a list of its rows, or "
            "use onward.generate for tensors [B, P]"
        )
    items = plain_items(ids)
    if not items:
        raise RequestError("the prompt is an empty list of ids: give at least one")
    return items


def check_top(name: str, count: int, vocab_size: int) -> None:
    """Raise `RequestError` unless `count` is from 0 to the size of the vocabulary."""
    check_whole(name, count, low=0)
    if count > vocab_size:
        raise OptionError(name, f"is {count}, but the vocabulary has {vocab_size} ids: ask for fewer")


# The ids of one text, or of each of several texts.
Emitted: TypeAlias = Ids | Sequence[Ids]


def checked_emitted(emitted: Emitted, request: Request, vocab_size: int) -> list[list[int]]:
    """Validate the ids from which to resume a request, and return a list for each of its `n` texts. Also raises
    `RequestError` if its texts are not determined by its prompt, options and seed."""
    options = request.options
    if options.seed is None and options.temperature > 0 and options.beams == 1:
        raise RequestError(
            "a sampled request without a seed cannot be resumed: give the seed of its texts "
            "(Completion.seed; set it when you submit the request)",
            option="seed",
        )
    if isinstance(emitted, str | bytes) or not isinstance(emitted, Sequence | np.ndarray | Tensor):
        raise OptionError("emitted", f"must be ids, or a list of ids for each text; got {type(emitted).__name__}")
    items = list(emitted)
    if not items:
        return [[] for _ in range(options.n)]
    nested = [isinstance(item, Sequence) or (isinstance(item, np.ndarray | Tensor) and item.ndim > 0) for item in items]
    if not any(nested):
        items = [emitted]
    elif not all(nested):
        raise OptionError("emitted", "must be ids, or a list of ids for each text; got a list of both")
    if len(items) != options.n:
        raise OptionError(
            "emitted", f"holds ids of {len(items)} texts, but the request has n={options.n}: give a list for each"
        )
    texts = [plain_items(ids) for ids in items]
    for ids in texts:
        for token in ids:
            if not _is_id(token, vocab_size):
                raise OptionError("emitted", f"must hold ids, whole numbers from 0 to {vocab_size - 1}; got {token!r}")
        if len(ids) > request.max_new_tokens:
            raise OptionError(
                "emitted",
                f"holds {len(ids)} ids of a text, but max_new_tokens is {request.max_new_tokens}: give the options of "
                "the request that emitted them",
            )
    return texts
