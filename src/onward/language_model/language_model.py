"""`LanguageModel`: a model, its tokenizer, its chat template and its defaults, behind a few verbs."""

import dataclasses
import datetime
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, Unpack, overload

import torch
from torch import Tensor

from onward.chat import AssistantMessage, ChatTemplate, Message, MessageFormat, checked_format, format_of
from onward.checkpoint import find_adapter, read_adapter
from onward.decoding import SharedCache
from onward.decoding.speculation import ModelDrafter, Speculator, check_same_tokens
from onward.errors import CheckpointError, RequestError
from onward.language_model.chat import ChatReader
from onward.language_model.completion import Completion, Piece
from onward.language_model.options import ChatOptionsDict, Draft, GenerateOptions, GenerateOptionsDict
from onward.language_model.request import (
    Ids,
    Prompt,
    Request,
    RequestReader,
    SpeculatorCache,
    as_list,
    check_top,
    checked_ids,
    needed_tokenizer,
    one_prompt,
)
from onward.language_model.runner import Runner, drained
from onward.language_model.scoring import Score, logits_of, score_continuations, score_texts
from onward.models import Cache, Model, ModelRun
from onward.models.adapters import Adapters, LoadedAdapter, merged_model
from onward.program import Report
from onward.tokenizer import Tokenizer
from onward.util.checks import check_whole, plain, plain_items
from onward.util.option_names import checks_option_names
from onward.util.text import described

# An item of a list of prompts. A type variable, because lists are invariant: a list[str] is no list[Prompt].
_Prompt = TypeVar("_Prompt", bound=Prompt)
_Prompts: TypeAlias = list[_Prompt] | tuple[_Prompt, ...]
Messages: TypeAlias = Sequence[Message | AssistantMessage]


class LanguageModel:
    """A `Model` with a tokenizer, which turns text into its ids and back.

    tokenizer: None where prompts are ids and texts stay empty. chat_template: None where there are no chats.
    defaults: the options that a request does not give.
    prefill_chunk: the most prompt tokens processed at once. It bounds memory.
    compile: what runs the model, a backend of `onward.compile`; "eager" calls its forward op by op.
    draft: guesses the next tokens of requests that give no `draft`: "lookup", "suffix", a smaller LanguageModel or
        Model of the same vocabulary, a `Drafter` or a `Speculator` (docs/speculation.md).
    prefix_memory: bytes of keys and values that are kept for prompts that begin as an earlier one did; 0 keeps none.
    message_format: how the model writes reasoning and calls of tools, a name in `onward.chat.FORMATS` or a
        `MessageFormat`; by default that of the chat template (docs/chat.md).
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        defaults: GenerateOptions | None = None,
        prefill_chunk: int = 512,
        compile: str = "auto",
        draft: Draft | None = None,
        prefix_memory: int = 2**30,
        message_format: str | MessageFormat | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.defaults = GenerateOptions() if defaults is None else defaults
        self._message_format = checked_format(message_format)
        self.prefill_chunk = prefill_chunk
        self._model_run = ModelRun(model, compile)
        self._adapters = Adapters(self._model_run)
        self._speculators = SpeculatorCache()
        self.prefix_memory = prefix_memory
        self.draft = draft

    def __repr__(self) -> str:
        text = "" if self.tokenizer is None else "tokenizer"
        chat = "" if self.chat_template is None else "chat template"
        return described(self, *self.model.facts(), text, chat)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the arguments, weights too. The copy reads the adapters again, from their folders."""
        folders = {name: loaded.folder for name, loaded in self.adapters.items()}
        return type(self), self._arguments(self.model), folders or None

    def __setstate__(self, folders: Mapping[str, Path]) -> None:
        for name, folder in folders.items():
            self.load_adapter(name, folder)

    def _arguments(self, model: Model) -> tuple[Any, ...]:
        compile, draft = self._model_run.compile, self._draft_source
        others = self.defaults, self.prefill_chunk, compile, draft, self.prefix_memory
        return model, self.tokenizer, self.chat_template, *others, self._message_format

    @property
    def model(self) -> Model:
        """The model that is decoded from. It may be replaced; sessions then forget the ids that they hold."""
        return self._model_run.model

    @model.setter
    def model(self, model: Model) -> None:
        if self.adapters:
            raise RequestError(f"adapters are loaded for the model of before: drop {', '.join(self.adapters)} first")
        self._model_run = ModelRun(model, self._model_run.compile)
        self._adapters = Adapters(self._model_run)

    @property
    def adapters(self) -> Adapters:
        """The loaded adapters by name."""
        return self._adapters

    @checks_option_names
    def load_adapter(self, name: str, source: str | os.PathLike[str]) -> LoadedAdapter:
        """Let requests say `adapter=name`. Other requests, also those that run, are not disturbed.

        source: a folder that peft wrote (LoRA, rsLoRA, DoRA; docs/adapters.md), or a hub id of one.

        Raises:
            SourceError: no such folder or repository. CheckpointError: it is damaged, or for another model.
            RequestError: the name is taken; it changes what rows share (norms, experts); the model has no family.
        """
        folder = find_adapter(source if isinstance(source, str) else Path(source))
        return self.adapters.load(name, read_adapter(folder), folder)

    def drop_adapter(self, name: str) -> None:
        """Refuse requests that name an adapter from now on (`RequestError` if unknown). Those that run go on."""
        self.adapters.drop(name)

    @property
    def prefix_memory(self) -> int:
        """The most bytes of keys and values that are kept between calls. Setting it forgets what is kept."""
        return self._kept.memory

    @prefix_memory.setter
    def prefix_memory(self, nbytes: int) -> None:
        check_whole("prefix_memory", nbytes, low=0)
        self._kept = SharedCache(nbytes)

    @property
    def message_format(self) -> MessageFormat:
        """How the model writes its answers: the format that was given, or that of the chat template."""
        sources = () if self.chat_template is None else self.chat_template.sources
        return self._message_format or format_of("\n".join(sources))

    def with_model(self, model: Model) -> "LanguageModel":
        """A language model with the same tokenizer, chat template and options, and without adapters."""
        return LanguageModel(*self._arguments(model))

    @torch.inference_mode(False)  # as `onward.load`
    def merge(self, adapter: str | os.PathLike[str]) -> "LanguageModel":
        """This model with an adapter merged into its weights, which are not changed: W becomes W + B A.

        adapter: the name of a loaded one; or a folder or hub id, as `load_adapter` takes.

        Raises:
            SourceError: no such folder or repository. CheckpointError: it is damaged, for another model, or its folder
                has changed since it was loaded. RequestError: the weights are quantized, or of no built-in family.
        """
        loaded = self.adapters.get(adapter) if isinstance(adapter, str) else None
        source = adapter if isinstance(adapter, str) else Path(adapter)
        read = read_adapter(find_adapter(source) if loaded is None else loaded.folder)
        if loaded is not None and read.digest != loaded.digest:
            raise CheckpointError(f"{loaded.folder} has changed since {loaded.name!r} was loaded: load it anew")
        return self.with_model(merged_model(self.model, read))

    def request(self, prompt: Prompt, **options: Unpack[GenerateOptionsDict]) -> Request:
        """A prompt and its options as one checked value, which `generate` and `stream` take in a prompt's place."""
        return self._reader.read([one_prompt(prompt, "request")], options)[0]

    @overload
    def generate(
        self, prompt: Prompt, *, cache: Cache | None = None, **options: Unpack[GenerateOptionsDict]
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: _Prompts[_Prompt],
        *,
        cache: Cache | None = None,
        per_prompt: Sequence[GenerateOptionsDict] | None = None,
        **options: Unpack[GenerateOptionsDict],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        cache: Cache | None = None,
        per_prompt: Sequence[GenerateOptionsDict] | None = None,
        **options: Unpack[GenerateOptionsDict],
    ) -> Completion | list[Completion]:
        """Complete a prompt, or several at once.

        Args:
            prompt: a text, which is encoded with the tokenizer's own special tokens, ids (a list, or one dimension of
                an array or tensor), or a `Request`; or a list of those.
            cache: made by `new_cache` for as many rows: one for each prompt, times `n` or `beams`. It is overwritten.
                To go on with a cache from call to call, use an `onward.Session`.
            per_prompt: for each prompt the options in which it differs, such as [{"temperature": 0}, {"seed": 7}].
            options: the fields of `onward.GenerateOptions`.

        Returns:
            A `Completion`, or a list of them, in order. With n > 1 its `choices` are all the texts of a prompt.

        Raises:
            RequestError: an unknown option, a value outside its range, options that contradict each other, an empty
                prompt, a cache of another size, an adapter that is not loaded.
            ContextOverflowError: prompt and new tokens do not fit the context or the cache.
            TokenizerError: a text prompt or a stop string without a tokenizer.
        """
        prompts, is_batch = as_list(prompt)
        completions = drained(self._runner.pieces(self._reader.read(prompts, options, per_prompt, cache), cache))
        return completions if is_batch else completions[0]

    def stream(
        self, prompt: Prompt, *, cache: Cache | None = None, **options: Unpack[GenerateOptionsDict]
    ) -> Generator[Piece, None, Completion]:
        """`generate` for one prompt, with a `Piece` for each token as it comes. The pieces add up to the text.

        The request is checked at the call, before the first piece is asked for. Where the checkpoint's defaults are
        beams or several texts, one text without beams is streamed. The generator returns the `Completion`, for
        `completion = yield from lm.stream(…)`.
        """
        (request,) = self._reader.read([one_prompt(prompt, "stream")], options, cache=cache, one_text=True)
        return self._runner.stream(request, cache)

    def chat(self, messages: Messages, **options: Unpack[ChatOptionsDict]) -> Completion:
        """The assistant's answer to a conversation, in the parts of `Completion.message`: content, reasoning, calls.

        Args:
            messages: such as [{"role": "user", "content": "Hi"}], oldest first. `Completion.message` of an earlier
                answer is one, too.
            options: as in `generate`, and those of `onward.language_model.ChatOptionsDict`: tools, tool_choice,
                parallel_tool_calls, now, template, and the variables of the chat template, such as enable_thinking.

        Raises:
            RequestError: also a variable that the chat template does not read, and what is no tool.
        """
        rest, cache = _without_cache(options)
        return drained(self._runner.pieces([self._chat_request(messages, rest, cache)], cache))[0]

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptionsDict]) -> Generator[Piece, None, Completion]:
        """`chat` with a `Piece` for each token, as `stream` does. `Piece.message` has what came of the message."""
        rest, cache = _without_cache(options)
        return self._runner.stream(self._chat_request(messages, rest, cache, one_text=True), cache)

    def chat_request(self, messages: Messages, **options: Unpack[ChatOptionsDict]) -> Request:
        """A conversation and its options as one checked value, which `generate` completes as `chat` does."""
        return self._chat_request(messages, options)

    def chat_prompt(
        self, messages: Messages, template: Mapping[str, Any] | None = None, now: datetime.datetime | None = None
    ) -> list[int]:
        """The ids of a conversation, up to where the answer begins. template: variables of the chat template."""
        return self._chat_reader.prompt(messages, template or {}, now)

    @overload
    def score(
        self, text: str | Ids, *, logprobs: int = 0, stride: int | None = None, adapter: str | None = None
    ) -> Score: ...

    @overload
    def score(
        self, text: _Prompts[_Prompt], *, logprobs: int = 0, stride: int | None = None, adapter: str | None = None
    ) -> list[Score]: ...

    @checks_option_names
    def score(
        self,
        text: Prompt | Sequence[Prompt],
        *,
        logprobs: int = 0,
        stride: int | None = None,
        adapter: str | None = None,
    ) -> Score | list[Score]:
        """How likely the model finds a text, or several: log-likelihood, perplexity, the logprob of each token.

        Args:
            text: as `generate` takes prompts, each of 2 ids at least. Of a `Request` only the ids count.
            logprobs: how many of the likeliest ids to report at each token's place.
            stride: scores texts longer than the context in windows of its length, each `stride` ids (from 1 to
                context - 1) after the one before. So every id is scored once, given at least context - stride ids.
            adapter: the name of a loaded adapter, that of a `Request` too.

        Raises:
            RequestError: a text of fewer ids, logprobs or a stride outside its range, an adapter that is not loaded.
            ContextOverflowError: a text longer than the context, and no stride.
        """
        texts, is_batch = as_list(text)
        all_ids = self._reader.ids_to_score(texts, adapter)
        changed_by = self.adapters.find(adapter)
        check_top("logprobs", logprobs, self.model.vocab_size)
        scores = score_texts(self._model_run, all_ids, logprobs, self.prefill_chunk, stride, changed_by)
        return scores if is_batch else scores[0]

    @checks_option_names
    def score_continuations(
        self, context: str | Ids, continuations: Sequence[str | Ids], *, logprobs: int = 0, adapter: str | None = None
    ) -> list[Score]:
        """How likely the model finds each of several continuations of one context, which is processed once.

        Args:
            context: a text, encoded with the tokenizer's own special tokens, or ids; one id at least.
            continuations: texts, encoded without special tokens, or ids; of one id at least each. The ids of a text
                are not always those that it has behind the context: give ids where that matters.
            logprobs, adapter: as in `score`, and so are the errors.

        Returns:
            A `Score` of each: bit for bit the logprobs that `score` gives the whole text's last ids.
        """
        changed_by = self.adapters.find(adapter)
        check_top("logprobs", logprobs, self.model.vocab_size)
        given = self._reader.prompt_ids(context)
        after = [
            self.encode(each, add_special_tokens=False) if isinstance(each, str) else self._reader.prompt_ids(each)
            for each in continuations
        ]
        return score_continuations(self._model_run, self._kept, given, after, logprobs, self.prefill_chunk, changed_by)

    @checks_option_names
    def logits(self, ids: Ids, *, adapter: str | None = None) -> Tensor:
        """The model's logits after each of `ids`: float32 [T, V], on the CPU. adapter: as in `score`.

        Raises:
            RequestError: no ids, one outside the vocabulary. ContextOverflowError: more ids than the context holds.
        """
        changed_by = self.adapters.find(adapter)
        ids = checked_ids(ids, self.model.vocab_size)
        return logits_of(self._model_run, ids, self.prefill_chunk, changed_by)

    @property
    def draft(self) -> Speculator | None:
        """The speculator of requests that give no `draft`. Set it to anything that `draft=` takes."""
        return self._draft

    @draft.setter
    def draft(self, draft: Draft | None) -> None:
        self._draft = self._speculator(draft)
        self._draft_source = draft

    def _chat_request(
        self, messages: Messages, options: Mapping[str, Any], cache: Any = None, *, one_text: bool = False
    ) -> Request:
        chat = self._chat_reader.read(messages, options)
        (request,) = self._reader.read([chat.ids], chat.options, cache=cache, one_text=one_text)
        return dataclasses.replace(request, answer=chat.answer)

    def _speculator(self, draft: Any) -> Speculator | None:
        if not isinstance(draft, LanguageModel):
            return self._speculators.of(draft)

        def drafter() -> ModelDrafter:
            if self.tokenizer is not None and draft.tokenizer is not None:
                check_same_tokens(self.tokenizer, draft.tokenizer)
            return ModelDrafter(draft.model, draft._model_run.compile, draft.prefill_chunk)

        return self._speculators.kept(id(draft), draft, drafter)

    @property
    def _reader(self) -> RequestReader:
        return RequestReader(self.model, self.tokenizer, self.defaults, self._draft, self._speculator, self.adapters)

    @property
    def _chat_reader(self) -> ChatReader:
        return ChatReader(self.chat_template, self.tokenizer, self.message_format)

    @property
    def _runner(self) -> Runner:
        return Runner(self._model_run, self.tokenizer, self.prefill_chunk, self._kept, self.adapters)

    @checks_option_names
    def explain(self, batch: int = 1, tokens: int = 1, offset: int = 0) -> Report:
        """A table of what runs for `tokens` tokens of `batch` rows at position `offset`: kernels, bytes, time."""
        return self._model_run.explain(batch, tokens, offset)

    @checks_option_names
    def new_cache(self, batch: int = 1, max_len: int | None = None) -> Cache:
        """A cache for `batch` rows of `max_len` positions (the whole context by default), to pass to `generate`."""
        length = self.model.max_seq_len if max_len is None else max_len
        if length is None:
            raise RequestError("this model does not say how long its context is: give max_len")
        if batch < 1 or length < 1:
            raise RequestError(f"a cache needs a batch and a max_len of 1 or more; got {batch} and {length}")
        return self.model.new_cache(batch, length)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that `generate` makes of a text prompt."""
        return needed_tokenizer(self.tokenizer, "a text prompt").encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Ids) -> str:
        """The text of ids, without special tokens."""
        listed = plain(ids)
        if isinstance(listed, str) or not isinstance(listed, Iterable):
            raise RequestError(f"ids to decode are a list, or one dimension of an array or tensor; got {listed!r}")
        return needed_tokenizer(self.tokenizer, "text").decode(plain_items(listed))


def _without_cache(options: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The options of a chat, and the cache that it is decoded in; None for one of the model's own."""
    rest = dict(options)
    return rest, rest.pop("cache", None)
