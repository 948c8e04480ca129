"""`LanguageModel`: a model with its tokenizer, chat template and default options."""

import datetime
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, Unpack, overload

import torch

from onward.chat import AssistantMessage, ChatTemplate, Message, MessageFormat, checked_format, format_of
from onward.checkpoint import EmbeddingFormat, find_adapter, read_adapter
from onward.decoding import SharedCache
from onward.decoding.speculation import ModelDrafter, Speculator, SpeculatorCache, as_drafter, check_same_tokens
from onward.errors import RequestError
from onward.language_model.chat import ChatReader
from onward.language_model.completion import Completion, Piece
from onward.language_model.embedder import Embedder
from onward.language_model.options import ChatOptionsDict, Draft, GenerateOptions
from onward.language_model.options_dict import GenerateOptionsDict
from onward.language_model.prefix_disk import PrefixDisk
from onward.language_model.request import (
    Ids,
    Prompt,
    Request,
    RequestReader,
    as_list,
    check_top,
    needed_tokenizer,
    one_prompt,
)  # fmt: skip
from onward.language_model.runner import Runner, drained
from onward.language_model.scoring import Score, score_continuations, score_texts
from onward.language_model.steering import read_control_vector
from onward.language_model.training import AdapterSource, Trained, reread_adapter
from onward.language_model.verification import Verifier
from onward.models import Cache, Model, Run
from onward.models.adapters import Adapters, LoadedAdapter, Steering, TrainedAdapter, merged_model
from onward.program import Report
from onward.tokenizer import Tokenizer
from onward.util.checks import check_whole, plain, plain_items
from onward.util.option_names import checks_option_names
from onward.util.text import described

# An item of a list of prompts. A type variable, because lists are invariant: a list[str] is not a list[Prompt].
_Prompt = TypeVar("_Prompt", bound=Prompt)
_Prompts: TypeAlias = list[_Prompt] | tuple[_Prompt, ...]
Messages: TypeAlias = Sequence[Message | AssistantMessage]


class LanguageModel(Trained, Embedder, Verifier):
    """A model that generates, chats and scores, with its tokenizer, chat template and default options.

    tokenizer: None if prompts are ids and texts stay empty. chat_template: None for a model without chats.
    defaults, draft: for requests that don't set these options. draft: "lookup", "suffix", a smaller LanguageModel or
        Model with the same vocabulary, a `Drafter` or a `Speculator` (docs/speculation.md).
    prefill_chunk: the maximum number of prompt tokens processed at once. It bounds memory.
    compile: a backend of `onward.compile` that runs the model; "eager" calls its forward op by op.
    prefix_memory: bytes of the prefix cache; 0 disables it. prefix_cache_dir, prefix_cache_disk: a folder for prefixes
        on disk, which later runs share, and its most bytes (16 GiB by default; docs/prefix-cache.md).
    message_format: how the model writes reasoning and tool calls, a name in `onward.chat.FORMATS` or a
        `MessageFormat`; by default the chat template's (docs/chat.md). embedding: how texts are embedded.
    """

    @checks_option_names
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
        embedding: EmbeddingFormat | None = None,
        prefix_cache_dir: str | os.PathLike[str] | None = None,
        prefix_cache_disk: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.defaults = GenerateOptions() if defaults is None else defaults
        self._message_format = checked_format(message_format)
        self.prefill_chunk = prefill_chunk
        self._model_run = Run(model, compile)
        self._adapters = Adapters(self._model_run)
        self._speculators = SpeculatorCache()
        self._disk = PrefixDisk.of(model, compile, prefix_cache_dir, prefix_cache_disk)
        self.prefix_memory = prefix_memory
        self.draft, self.embedding = draft, embedding or EmbeddingFormat()

    def __repr__(self) -> str:
        parts = ("" if self.tokenizer is None else "tokenizer", "" if self.chat_template is None else "chat template")
        return described(self, *self.model.facts(), *parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the arguments, including the weights, and the control vectors. The copy reloads the adapters
        from their folders, or has copies of those that are trained."""
        state = self.source, self.adapters.sources(), self.adapters.control_vectors
        return type(self), self._arguments(self.model), state

    def __setstate__(self, state: tuple[Path | None, Mapping[str, AdapterSource], dict[str, Steering]]) -> None:
        self.source, sources, self.adapters.control_vectors = state
        self.add_adapters(sources)

    def _arguments(self, model: Model) -> tuple[Any, ...]:
        rest = self.defaults, self.prefill_chunk, self._model_run.compile, self._draft_source, self.prefix_memory
        disk = () if self._disk is None else self._disk.arguments
        return model, self.tokenizer, self.chat_template, *rest, self._message_format, self.embedding, *disk

    @property
    def model(self) -> Model:
        """The model. It can be replaced; sessions then forget their ids."""
        return self._model_run.model

    @model.setter
    def model(self, model: Model) -> None:
        if self.adapters:
            raise RequestError(f"adapters are loaded for the previous model: drop {', '.join(self.adapters)} first")
        self._model_run = Run(model, self._model_run.compile)
        self._adapters = Adapters(self._model_run)

    @property
    def adapters(self) -> Adapters:
        """The loaded adapters by name."""
        return self._adapters

    @checks_option_names
    def load_adapter(self, name: str, source: str | os.PathLike[str]) -> LoadedAdapter:
        """Load an adapter for requests with `adapter=name`. Other requests, even running ones, are not affected.

        source: a folder written by peft (LoRA, rsLoRA, DoRA; docs/adapters.md), or a hub id of one.

        Raises:
            SourceError: no such folder or repository. CheckpointError: it is damaged, or for another model.
            RequestError: the name is taken; it changes shared weights (norms, experts); the model has no family.
        """
        folder = find_adapter(source)
        return self.adapters.load(name, read_adapter(folder), folder)

    def drop_adapter(self, name: str) -> None:
        """Reject further requests with an adapter (`RequestError` if unknown). Running ones continue."""
        self.adapters.drop(name)

    @checks_option_names
    def load_control_vector(self, name: str, source: str | os.PathLike[str]) -> None:
        """Load a control vector, a GGUF file, for requests to a server that name it (docs/hidden-states.md). Raises
        `RequestError` if it is for another model, and `CheckpointError` if it is damaged."""
        self.adapters.add_control_vector(name, read_control_vector(source))

    @property
    def prefix_memory(self) -> int:
        """The maximum size of the prefix cache in bytes. Setting it clears the cache, except for texts of sessions."""
        return self._prefix_cache.memory

    @prefix_memory.setter
    def prefix_memory(self, nbytes: int) -> None:
        check_whole("prefix_memory", nbytes, low=0)
        self._prefix_cache = SharedCache(nbytes, self._disk)

    @property
    def message_format(self) -> MessageFormat:
        """The format of the model's answers: the `message_format` argument, or that of the chat template."""
        sources = () if self.chat_template is None else self.chat_template.sources
        return self._message_format or format_of("\n".join(sources))

    def with_model(self, model: Model) -> "LanguageModel":
        """Another model with the same tokenizer, chat template and options, and without adapters."""
        return LanguageModel(*self._arguments(model))

    @torch.inference_mode(False)  # as `onward.load`
    def merge(self, adapter: str | os.PathLike[str]) -> "LanguageModel":
        """A new model with an adapter merged into its weights: W becomes W + B A.

        adapter: the name of a loaded one, or of one that is trained, for its current values; or a folder or hub id, as
            for `load_adapter`.

        Raises:
            SourceError: no such folder or repository. CheckpointError: it is damaged, for another model, or its folder
                has changed since it was loaded. RequestError: the weights are quantized, or of no built-in family.
        """
        source = self.adapters.sources().get(adapter) if isinstance(adapter, str) else None
        if source is None:
            read = read_adapter(find_adapter(adapter if isinstance(adapter, str) else Path(adapter)))
        else:
            read = source.adapter() if isinstance(source, TrainedAdapter) else reread_adapter(source)
        return self.with_model(merged_model(self.model, read))

    def request(self, prompt: Prompt, **options: Unpack[GenerateOptionsDict]) -> Request:
        """A prompt and its options as one validated value, for `generate` and `stream`."""
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
            prompt: a text, which is encoded with the tokenizer's special tokens, ids (a list, or a one-dimensional
                array or tensor), or a `Request`; or a list of those.
            cache: made by `new_cache` with a row for each prompt, times `n` or `beams`. It is overwritten. To continue
                a cache from call to call, use an `onward.Session`.
            per_prompt: the options that differ between prompts, such as [{"temperature": 0}, {"seed": 7}].
            options: the fields of `onward.GenerateOptions`.

        Returns:
            A `Completion`, or a list of them, in order. With n > 1 its `choices` are all texts of a prompt.

        Raises:
            RequestError: invalid prompts or options, a cache of another size, an adapter that is not loaded.
            ContextOverflowError: prompt and new tokens do not fit the context or the cache.
            TokenizerError: a text prompt or a stop string without a tokenizer.
        """
        prompts, is_batch = as_list(prompt)
        completions = drained(self._runner.pieces(self._reader.read(prompts, options, per_prompt, cache), cache))
        return completions if is_batch else completions[0]

    def stream(
        self, prompt: Prompt, *, cache: Cache | None = None, **options: Unpack[GenerateOptionsDict]
    ) -> Generator[Piece, None, Completion]:
        """`generate` for one prompt, as a generator of a `Piece` for each token. The pieces add up to the text.

        The request is validated by the call. Defaults of beams or several texts are ignored. The generator returns the
        `Completion`, for `completion = yield from lm.stream(…)`.
        """
        (request,) = self._reader.read([one_prompt(prompt, "stream")], options, cache=cache, one_text=True)
        return self._runner.stream(request, cache)

    def chat(self, messages: Messages, **options: Unpack[ChatOptionsDict]) -> Completion:
        """The assistant's answer to a conversation, with `Completion.message`: content, reasoning, tool calls.

        Args:
            messages: such as [{"role": "user", "content": "Hi"}], oldest first; also the `Completion.message` of
                earlier answers.
            options: those of `generate`, and of `onward.language_model.ChatOptionsDict`: tools, tool_choice,
                parallel_tool_calls, now, template, and the variables of the chat template, such as enable_thinking.

        Raises:
            RequestError: also a variable that the chat template does not read, and an invalid tool.
        """
        rest: dict[str, Any] = {**options}
        cache = rest.pop("cache", None)
        return drained(self._runner.pieces([self._chat_request(messages, rest, cache)], cache))[0]

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptionsDict]) -> Generator[Piece, None, Completion]:
        """`chat` as a generator, like `stream`. `Piece.message` is the token's part of the message."""
        rest: dict[str, Any] = {**options}
        cache = rest.pop("cache", None)
        return self._runner.stream(self._chat_request(messages, rest, cache, one_text=True), cache)

    def chat_request(self, messages: Messages, **options: Unpack[ChatOptionsDict]) -> Request:
        """A conversation and its options as one validated value, which `generate` completes like `chat`."""
        return self._chat_request(messages, options)

    def chat_prompt(
        self, messages: Messages, template: Mapping[str, Any] | None = None, now: datetime.datetime | None = None
    ) -> list[int]:
        """The ids of a conversation, up to the beginning of the answer. template: variables of the chat template, and
        the options add_generation_prompt and continue_final_message."""
        text = self._chat_reader.text(messages, template or {}, now)
        return needed_tokenizer(self.tokenizer, "a chat").encode(text, add_special_tokens=False)

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
        """Score a text, or several: log-likelihood, perplexity, the logprob of each token.

        Args:
            text: prompts as for `generate`, of at least 2 ids. Only the ids of a `Request` count.
            logprobs: how many of the most likely ids to report for each token.
            stride: score texts longer than the context in windows of its length, each `stride` ids (from 1 to
                context - 1) after the previous one, so that at least context - stride ids precede each scored one.
            adapter: the name of a loaded adapter, also that of a `Request`.

        Raises:
            RequestError: a text of fewer ids, logprobs or a stride outside its range, an adapter that is not loaded.
            ContextOverflowError: a text longer than the context, without a stride.
        """
        texts, is_batch = as_list(text)
        all_ids = self._reader.ids_to_score(texts, adapter)
        loaded = self.adapters.find(adapter)
        check_top("logprobs", logprobs, self.model.vocab_size)
        scores = score_texts(self._model_run, all_ids, logprobs, self.prefill_chunk, stride, loaded)
        return scores if is_batch else scores[0]

    @checks_option_names
    def score_continuations(
        self, context: str | Ids, continuations: Sequence[str | Ids], *, logprobs: int = 0, adapter: str | None = None
    ) -> list[Score]:
        """Score several continuations of one context, which is processed once: bit for bit the logprobs that `score`
        gives the last ids of the whole text, with the same errors.

        context: a text, encoded with the tokenizer's special tokens, or ids; at least one id.
        continuations: texts, encoded without special tokens, or ids; at least one id each. A text may be tokenized
            differently after its context: pass ids if that matters.
        logprobs, adapter: as in `score`.
        """
        loaded = self.adapters.find(adapter)
        check_top("logprobs", logprobs, self.model.vocab_size)
        ids = self._reader.prompt_ids(context)
        after, cache, chunk = self._reader.continuation_ids(continuations), self._prefix_cache, self.prefill_chunk
        return score_continuations(self._model_run, cache, ids, after, logprobs, chunk, loaded)

    @property
    def draft(self) -> Speculator | None:
        """The speculator of requests that don't set `draft`. Can be set to anything that `draft=` takes."""
        return self._draft

    @draft.setter
    def draft(self, draft: Draft | None) -> None:
        self._draft = self._speculator(draft)
        self._draft_source = draft

    def _chat_request(
        self, messages: Messages, options: Mapping[str, Any], cache: Any = None, *, one_text: bool = False
    ) -> Request:
        chat = self._chat_reader.read(messages, options)
        return self._reader.read([chat.ids], chat.options, cache=cache, one_text=one_text, answer=chat.answer)[0]

    def _speculator(self, draft: Any) -> Speculator | None:
        return self._speculators.get(draft, self._drafter if isinstance(draft, LanguageModel) else as_drafter)

    def _drafter(self, draft: "LanguageModel") -> ModelDrafter:
        if self.tokenizer is not None and draft.tokenizer is not None:
            check_same_tokens(self.tokenizer, draft.tokenizer)
        return ModelDrafter(draft.model, draft._model_run.compile, draft.prefill_chunk)

    @property
    def _reader(self) -> RequestReader:
        return RequestReader(self.model, self.tokenizer, self.defaults, self._draft, self._speculator, self.adapters)

    @property
    def _chat_reader(self) -> ChatReader:
        return ChatReader(self.chat_template, self.tokenizer, self.message_format, self.model.max_seq_len)

    @property
    def _runner(self) -> Runner:
        return Runner(self._model_run, self.tokenizer, self.prefill_chunk, self._prefix_cache, self.adapters)

    @checks_option_names
    def explain(self, batch: int = 1, tokens: int = 1, offset: int = 0) -> Report:
        """A table of the kernels, bytes and time of a step: `tokens` tokens of `batch` rows at position `offset`."""
        return self._model_run.explain(batch, tokens, offset)

    @checks_option_names
    def new_cache(self, batch: int = 1, max_len: int | None = None) -> Cache:
        """A cache of `batch` rows with `max_len` positions (by default the whole context), for `generate`."""
        if (length := self.model.max_seq_len if max_len is None else max_len) is None:
            raise RequestError("this model has no max_seq_len: give max_len")
        if min(batch, length) < 1:
            raise RequestError(f"a cache needs a batch and a max_len of 1 or more; got {batch} and {length}")
        return self.model.new_cache(batch, length)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, as `generate` encodes prompts."""
        return needed_tokenizer(self.tokenizer, "a text prompt").encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Ids) -> str:
        """The text of ids, without special tokens."""
        items = plain(ids)
        if isinstance(items, str) or not isinstance(items, Iterable):
            raise RequestError(f"ids to decode are a list, or one dimension of an array or tensor; got {items!r}")
        return needed_tokenizer(self.tokenizer, "text").decode(plain_items(items))
