"""What a language model says about texts without new tokens: hidden states, embeddings and relevance."""

from collections.abc import Sequence
from typing import TypeAlias, TypeVar, Unpack, overload

import torch
from torch import Tensor

from onward.checkpoint import EmbeddingFormat
from onward.language_model.base import LanguageModelPart
from onward.language_model.embedding import EmbeddingReader, EmbedOptions
from onward.language_model.lens import Lens, checked_decoder, predictions
from onward.language_model.options import GenerateOptions
from onward.language_model.request import Ids, Prompt, Request, as_list, check_top, checked_ids, one_prompt
from onward.language_model.runner import drained
from onward.language_model.scoring import logits_of
from onward.language_model.tapped import HiddenAt, check_names, checked_at, in_groups, weighted_mean
from onward.models.contract import NORM
from onward.tokenizer import special_tokens
from onward.util.checks import check_whole
from onward.util.option_names import check_option_names, checks_option_names

_Text = TypeVar("_Text", bound=Prompt)
_Texts: TypeAlias = list[_Text] | tuple[_Text, ...]


class Embedder(LanguageModelPart):
    """The verbs of a `LanguageModel` that generate nothing. embedding: how the checkpoint embeds."""

    embedding: EmbeddingFormat

    @checks_option_names
    def logits(self, ids: Ids, *, adapter: str | None = None) -> Tensor:
        """The logits after each of `ids`: float32 [T, V], on the CPU. adapter: as in `score`.

        Raises:
            RequestError: no ids, one outside the vocabulary. ContextOverflowError: more ids than the context holds.
        """
        runner = self._runner
        ids, loaded = checked_ids(ids, runner.run.model.vocab_size), runner.adapters.find(adapter)
        return logits_of(runner.run, ids, runner.chunk, loaded)

    @overload
    def hidden_states(
        self, text: str | Ids, taps: str, *, at: HiddenAt = "all", adapter: str | None = None
    ) -> Tensor: ...

    @overload
    def hidden_states(
        self, text: str | Ids, taps: list[str], *, at: HiddenAt = "all", adapter: str | None = None
    ) -> dict[str, Tensor]: ...

    @overload
    def hidden_states(
        self, text: _Texts[_Text], taps: str, *, at: HiddenAt = "all", adapter: str | None = None
    ) -> list[Tensor]: ...

    @overload
    def hidden_states(
        self, text: _Texts[_Text], taps: list[str], *, at: HiddenAt = "all", adapter: str | None = None
    ) -> list[dict[str, Tensor]]: ...

    @checks_option_names
    def hidden_states(
        self,
        text: Prompt | Sequence[Prompt],
        taps: str | list[str],
        *,
        at: HiddenAt = "all",
        adapter: str | None = None,
    ) -> Tensor | dict[str, Tensor] | list[Tensor] | list[dict[str, Tensor]]:
        """The hidden states of a text, or of several, at taps of the model's forward (docs/hidden-states.md).

            lm.hidden_states("Once upon a time", "layers.3")  # [T, D]
            lm.hidden_states(["A fox.", "A dog."], ["embedding", "norm"], at="last")

        Args:
            text: prompts as for `generate`; of a `Request` only the ids count.
            taps: a name, or a list of names, of `Model.taps`: "embedding", "layers.0" … and "norm" for the built-in
                families and for models of transformers. "layers.3" is transformers' `hidden_states[4]`.
            at: "all" positions [T, D], the "last" one [D], or their "mean" [D] in float32.
            adapter: the name of a loaded adapter, also that of a `Request`.

        Returns:
            A tensor on the CPU, in the model's dtype; for a list of names a dict of tensors; for a list of texts a
            list. A text's values are bit for bit the same alone, among other texts, and in chunks.

        Raises:
            RequestError: an unknown tap, values of too many bytes, an adapter that is not loaded.
            ContextOverflowError: a text longer than the context.
        """
        texts, is_batch = as_list(text)
        names = [taps] if isinstance(taps, str) else list(taps)
        check_names(self._runner.run.model, names)
        all_ids = self._reader.ids_to_score(texts, adapter)
        found = self._values(all_ids, names, checked_at(at), adapter)
        results = [values[taps] if isinstance(taps, str) else values for values in found]
        return results if is_batch else results[0]  # type: ignore[return-value]

    @checks_option_names
    def lens(self, text: str | Ids, *, top: int = 5, adapter: str | None = None) -> Lens:
        """What the model would predict after each layer: the logit lens (docs/hidden-states.md).

            print(lm.lens("Once upon a time"))

        Args:
            text: a text, or ids. top: how many of the most likely ids to report.
            adapter: the name of a loaded adapter, whose hidden states and head the predictions are.

        Raises:
            RequestError: a model of no built-in family, one without a head, top outside its range, or an adapter that
                is not loaded.
            ContextOverflowError: a text longer than the context.
        """
        model = self._runner.run.model
        decoder, params = checked_decoder(model)
        check_top("top", top, model.vocab_size)
        check_whole("top", top, low=1)
        (ids,) = self._reader.ids_to_score([one_prompt(text, "lens", "call it for each")], adapter)
        taps = [name for name in model.taps if name != NORM]
        (hidden,) = self._values([ids], taps, "all", adapter)
        if adapter is not None:
            params = self._runner.adapters.params_of(adapter, params, 1)
        each = [predictions(decoder, params, model.device, hidden[name], ids[1:], top) for name in taps]
        top_ids, top_logprobs, next_logprobs = (torch.stack(values) for values in zip(*each, strict=True))
        texts = {}
        if (tokenizer := self._runner.tokenizer) is not None:
            special, shown = special_tokens(tokenizer), {*ids, *top_ids[..., 0].flatten().tolist()}
            texts = {token: special.get(token) or tokenizer.decode([token]) for token in shown}
        return Lens(taps, ids, top_ids, top_logprobs, next_logprobs, texts)

    def embed(self, text: str | Ids | Sequence[str | Ids], **options: Unpack[EmbedOptions]) -> Tensor:
        """The embedding of a text, float32 [D], or of several, float32 [N, D] (docs/embeddings.md).

        Pooling, prompts and the end of a text are those of the checkpoint's sentence-transformers files; without such
        files the embedding is the last id's final norm. A text's embedding is bit for bit the same alone and among
        other texts.

        Args:
            text: a text, or ids; or a list of those.
            dimensions: keep only the first ones, for models trained to allow it (Matryoshka).
            normalize: divide by the length, after that.
            prompt: a text before each text. prompt_name: that of the checkpoint's prompts, such as "query"; by default
                the checkpoint's default prompt, if it has one.
            adapter: the name of a loaded adapter.

        Raises:
            RequestError: an unknown prompt, too many dimensions, a checkpoint whose pooling is not supported.
            ContextOverflowError: a text longer than the context.
        """
        check_option_names(options, list(EmbedOptions.__annotations__))
        texts, is_batch = as_list(text)
        requests = self._embedding_reader.texts(texts, **options)  # type: ignore[arg-type]
        embeddings = torch.stack(self._pooled(requests))
        return embeddings if is_batch else embeddings[0]

    @checks_option_names
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        template: str | None = None,
        adapter: str | None = None,
    ) -> list[float]:
        """The relevance of each document to the query, from 0 to 1, in the order of the documents
        (docs/embeddings.md).

        It is the probability of "yes" against "no" as the next token, as Qwen3-Reranker is trained, or the sigmoid of a
        classifier's only label.

        Args:
            instruction: the task, in a sentence. template: how the model reads a pair: a text with "{query}",
                "{document}" and optionally "{instruction}". The default is Qwen3-Reranker's.
            adapter: the name of a loaded adapter.

        Raises:
            RequestError: a checkpoint that does not rank. ContextOverflowError: a pair longer than the context.
        """
        requests = self._embedding_reader.pairs(
            query, documents, instruction=instruction, template=template, adapter=adapter
        )
        return [float(score) for score in self._pooled(requests)]

    @property
    def _embedding_reader(self) -> EmbeddingReader:
        return EmbeddingReader(self._reader, self.embedding)

    def _pooled(self, requests: Sequence[Request]) -> list[Tensor]:
        def run(group: list[int]) -> list[Tensor]:
            completions = drained(self._runner.pieces([requests[index] for index in group]))
            return [completion.embedding for completion in completions if completion.embedding is not None]

        return in_groups([len(request.prompt) for request in requests], run)

    def _values(
        self, texts: Sequence[list[int]], names: Sequence[str], at: HiddenAt, adapter: str | None
    ) -> list[dict[str, Tensor]]:
        """The values of each text at each tap."""
        options = GenerateOptions(
            max_new_tokens=0, taps=dict.fromkeys(names, "last" if at == "last" else "all"), adapter=adapter
        )

        def run(group: list[int]) -> list[dict[str, Tensor]]:
            requests = self._reader.read([Request(tuple(texts[index]), options) for index in group], {})
            taps = [completion.taps or {} for completion in drained(self._runner.pieces(requests))]
            if at != "mean":
                return [dict(values) for values in taps]
            return [{name: weighted_mean(value) for name, value in values.items()} for values in taps]

        return in_groups([len(ids) for ids in texts], run)
