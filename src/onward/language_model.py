"""What users hold: a model, its tokenizer, its chat template and its defaults, behind a few verbs."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.cache import KVCache, SizedCache
from onward.checkpoint import ChatTemplate, Message, Tokenizer
from onward.completion import Completion, Piece, Stopwatch
from onward.decoding import DecodeState, DecodeStep, NoText, Picker, Row, StopStrings, StreamingDetokenizer, decode_loop
from onward.errors import ContextOverflowError, RequestError, TokenizerError
from onward.models import Cache, Model, ModelRun, padded_length
from onward.program import Report
from onward.sampling import History, Sampler, SamplingParams

Ids = Sequence[int]
Prompt = str | Ids


@dataclass(frozen=True)
class _Request:
    """One prompt and what was asked for it."""

    prompt: list[int]
    params: SamplingParams


class LanguageModel:
    """A `Model` with what turns text into its ids and back.

    model: any `onward.Model`.
    tokenizer: None where prompts are ids and texts stay empty.
    chat_template: None where there are no chats.
    defaults: the options of a request that does not give them.
    prefill_chunk: the most prompt tokens processed at once. It bounds memory and changes no token.
    compile: what runs the model, a backend of `onward.compile`; "eager" calls its forward op by op, with the same
        result for models written in `onward.ops`.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        defaults: SamplingParams | None = None,
        prefill_chunk: int = 512,
        compile: str = "auto",
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.defaults = SamplingParams() if defaults is None else defaults
        self.prefill_chunk = prefill_chunk
        self._run_of_model = ModelRun(model, compile)

    def generate(
        self, prompt: Prompt | Sequence[Prompt], *, cache: Cache | None = None, **options: Any
    ) -> Completion | list[Completion]:
        """Complete a prompt, or several at once.

        Args:
            prompt: a text, a list of ids, or a list of either. A text is encoded with the tokenizer's own special
                tokens (a BOS, for some); ids are taken as they are.
            cache: one made by `new_cache` for as many rows; what it held before is overwritten.
            options: the fields of `SamplingParams`; those not given are the checkpoint's (`defaults`).

        Returns:
            A `Completion`, or a list of them for a list of prompts, in order.

        Raises:
            RequestError: an unknown option or a value outside its range, an empty prompt, a cache of another size.
            ContextOverflowError: prompt and new tokens do not fit the context or the cache.
            TokenizerError: a text prompt or a stop string, and no tokenizer.
        """
        prompts, is_batch = _as_list(prompt)
        requests = self._requests(prompts, options)
        watch = Stopwatch()
        run = self._run(requests, cache, watch)
        while True:
            try:
                next(run)
            except StopIteration as end:
                completions: list[Completion] = end.value
                return completions if is_batch else completions[0]

    def stream(
        self, prompt: Prompt, *, cache: Cache | None = None, **options: Any
    ) -> Generator[Piece, None, Completion]:
        """`generate` for one prompt, a `Piece` a token as they come; the pieces add up to its text.

        A piece's text is empty while a character or a possible stop string is unfinished. The request is checked
        here, before the first piece is asked for. What the generator returns in the end is the `Completion`, for
        `completion = yield from lm.stream(…)`.
        """
        prompts, is_batch = _as_list(prompt)
        if is_batch:
            raise RequestError(f"stream takes one prompt; got a list of {len(prompts)}: use generate for several")
        requests = self._requests(prompts, options)
        return _only(self._run(requests, cache, Stopwatch()))

    def chat(self, messages: Sequence[Message], **options: Any) -> Completion:
        """The assistant's answer to a conversation.

        Args:
            messages: such as [{"role": "user", "content": "Hi"}], oldest first.
            options: as of `generate`; and `template`, a mapping of variables for the chat template.
        """
        completion = self.generate(self.chat_prompt(messages, options.pop("template", None)), **options)
        assert isinstance(completion, Completion)
        return completion

    def stream_chat(self, messages: Sequence[Message], **options: Any) -> Generator[Piece, None, Completion]:
        """`chat`, a `Piece` a token."""
        return self.stream(self.chat_prompt(messages, options.pop("template", None)), **options)

    def chat_prompt(self, messages: Sequence[Message], template: Mapping[str, Any] | None = None) -> list[int]:
        """The ids of a conversation as the chat template writes it, up to where the answer begins."""
        if self.chat_template is None:
            raise TokenizerError("this model has no chat template: use generate with a plain prompt")
        text = self.chat_template.render(messages, **(template or {}))
        # The template writes the special tokens itself.
        return self._tokenizer("a chat").encode(text, add_special_tokens=False)

    @torch.no_grad()
    def logits(self, ids: Ids) -> Tensor:
        """What the model predicts after each of `ids`: float32 [T, V], on the CPU."""
        self._check_ids(ids)
        self._check_room(len(ids), 0, None)
        tokens = torch.tensor([list(ids)], dtype=torch.int32, device=self.model.device)
        cache = self.model.new_cache(1, len(ids))
        parts = []
        for start in range(0, len(ids), self.prefill_chunk):
            offsets = torch.tensor([start], dtype=torch.int32, device=self.model.device)
            logits, cache = self.model(tokens[:, start : start + self.prefill_chunk], offsets, cache)
            parts.append(logits[0].to(device="cpu", dtype=torch.float32))
        return torch.cat(parts)

    @property
    def _model_run(self) -> ModelRun:
        # `model` may have been replaced, as a copy that is to be quantized has it.
        if self._run_of_model.model is not self.model:
            self._run_of_model = ModelRun(self.model, self._run_of_model.compile)
        return self._run_of_model

    def explain(self, batch: int = 1, tokens: int = 1, offset: int = 0) -> Report:
        """What runs for `tokens` tokens of `batch` rows at position `offset`: print it for a table of kernels, bytes
        and time, and what has no kernel."""
        return self._model_run.explain(batch, tokens, offset)

    def new_cache(self, batch: int = 1, max_len: int | None = None) -> Cache:
        """A cache for `batch` rows of `max_len` positions (the whole context by default), to pass to `generate`."""
        length = self.model.max_seq_len if max_len is None else max_len
        if length is None:
            raise RequestError("this model does not say how long its context is: give max_len")
        if batch < 1 or length < 1:
            raise RequestError(f"a cache wants a batch and a max_len of 1 or more; got {batch} and {length}")
        return self.model.new_cache(batch, length)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that `generate` makes of a text prompt."""
        return self._tokenizer("a text prompt").encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Ids) -> str:
        """The text of ids, special tokens left out."""
        return self._tokenizer("text").decode(ids)

    # ── one request, checked ──────────────────────────────────────────────────────────────────────────────

    def _requests(self, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> list[_Request]:
        params = self.defaults.replace(**options)
        if params.stop and self.tokenizer is None:
            raise TokenizerError("stop strings need a tokenizer, and this model has none: use eos with ids")
        if out := [token for token in params.eos or () if token >= self.model.vocab_size]:
            raise RequestError(f"eos names id {out[0]}, but the vocabulary ends at {self.model.vocab_size - 1}")
        if any(isinstance(word, str) for word in params.bad_words):
            params = params.replace(bad_words=tuple(self._word_ids(params.bad_words)))
        return [_Request(self._prompt_ids(prompt), params) for prompt in prompts]

    def _word_ids(self, words: Sequence[str | tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """Ids of banned words; a text both as it begins a line and as it stands after a space."""
        for word in words:
            if not isinstance(word, str):
                yield word
                continue
            tokenizer = self._tokenizer("a bad word given as text")
            written = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in (word, f" {word}"))
            yield from dict.fromkeys(ids for ids in written if ids)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            ids = list(prompt)
            self._check_ids(ids)
            return ids
        ids = self.encode(prompt)
        if ids:
            return ids
        if self.tokenizer is None or self.tokenizer.bos_id is None:
            raise RequestError("the prompt is empty and this model has no BOS token to start from: give some text")
        return [self.tokenizer.bos_id]

    def _check_ids(self, ids: Ids) -> None:
        if not ids:
            raise RequestError("the prompt is an empty list of ids: give at least one")
        vocab = self.model.vocab_size
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise RequestError(f"a prompt of ids wants whole numbers from 0 to {vocab - 1}; got {token!r}")

    def _check_room(self, prompt: int, new: int, cache_len: int | None) -> None:
        context = self.model.max_seq_len
        limits = [limit for limit in (context, cache_len) if limit is not None]
        if not limits or prompt + new <= min(limits):
            return
        limit = min(limits)
        what = "context" if limit == context else "cache"
        if prompt > limit or new == 0:
            raise ContextOverflowError(
                f"the prompt is {prompt} tokens long, but the {what} holds {limit}: shorten the prompt"
            )
        raise ContextOverflowError(
            f"prompt ({prompt} tokens) + max_new_tokens ({new}) = {prompt + new}, but the {what} holds {limit}: "
            f"ask for at most {limit - prompt} new tokens or shorten the prompt"
        )

    def _tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError(f"{what} needs a tokenizer, and this model has no tokenizer.json: give ids")
        return self.tokenizer

    # ── the loop, and what is made of it ──────────────────────────────────────────────────────────────────

    def _run(
        self, requests: Sequence[_Request], cache: Cache | None, watch: Stopwatch
    ) -> Generator[Piece, None, list[Completion]]:
        """Checks at once, then hands out a generator over the one loop."""
        longest = 0
        for request in requests:
            self._check_room(
                len(request.prompt),
                request.params.max_new_tokens,
                cache.max_len if isinstance(cache, SizedCache) else None,
            )
            longest = max(longest, len(request.prompt) + request.params.max_new_tokens)
        self._check_cache(cache, len(requests))
        sampler = Sampler([request.params for request in requests], self.model.device)
        rows = [self._row(request) for request in requests]
        return self._pieces(requests, rows, sampler, cache, longest, watch)

    def _pieces(
        self,
        requests: Sequence[_Request],
        rows: Sequence[Row],
        sampler: Sampler,
        cache: Cache | None,
        longest: int,
        watch: Stopwatch,
    ) -> Generator[Piece, None, list[Completion]]:
        prompts = [request.prompt for request in requests]
        # A cache of ours may be narrowed to the rows that go on; one that was given is to stay whole.
        own = cache is None
        if cache is None:
            cache = self.model.new_cache(len(requests), padded_length(longest, self.model))
        state = DecodeState.start(prompts, cache, self.model.device, compact=own)
        histories = [History(prompt) for prompt in prompts] if sampler.needs_history else None
        step = DecodeStep(self._model_run, Picker(sampler, histories), self.prefill_chunk)
        for emission in decode_loop(step, state, rows):
            watch.lap(emission.seconds)
            for _, token, text in emission.pieces:
                yield Piece(text, token)
        return [
            Completion(
                text=row.text,
                token_ids=row.token_ids,
                finish_reason=row.finish_reason or "length",
                timing=watch.timing(len(row.token_ids)),
                prompt_tokens=len(request.prompt),
                seed=None if request.params.temperature == 0 else seed,
            )
            for request, row, seed in zip(requests, rows, sampler.seeds, strict=True)
        ]

    def _row(self, request: _Request) -> Row:
        params, tokenizer = request.params, self.tokenizer
        eos = frozenset() if params.ignore_eos or params.eos is None else frozenset(params.eos)
        if tokenizer is None:
            return Row(params.max_new_tokens, eos, NoText())
        detokenizer = StreamingDetokenizer(tokenizer.decode, before=request.prompt)
        return Row(params.max_new_tokens, eos, StopStrings(detokenizer, params.stop))

    def _check_cache(self, cache: Cache | None, rows: int) -> None:
        if isinstance(cache, KVCache) and cache.batch != rows:
            raise RequestError(f"the cache was made for {cache.batch} rows, and there are {rows} prompts")


def _only(run: Generator[Piece, None, list[Completion]]) -> Generator[Piece, None, Completion]:
    (completion,) = yield from run
    return completion


def _as_list(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list of them."""
    if isinstance(prompt, str):
        return [prompt], False
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(f"a prompt is a str, a list of ids, or a list of either; got {type(prompt).__name__}")
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, str | Sequence) for item in items):
        return items, True
    return [items], False
