"""Requests for embeddings and for scores of documents, and what they make of the values at the last norm."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from onward.checkpoint import EmbeddingFormat
from onward.decoding.tap_capture import TapPositions
from onward.errors import ContextOverflowError, OptionError, RequestError
from onward.language_model.options import GenerateOptions
from onward.language_model.request import Ids, Request, RequestReader, needed_tokenizer
from onward.language_model.tapped import weighted_mean
from onward.models import Model
from onward.models.architecture import head_of
from onward.models.contract import NORM
from onward.util.checks import check_whole


class EmbedOptions(TypedDict, total=False):
    """The options of `LanguageModel.embed`, which explains them. By default embeddings are normalized."""

    dimensions: int | None
    normalize: bool
    prompt: str | None
    prompt_name: str | None
    adapter: str | None


# The words of Qwen3-Reranker, for its layout: a query and a document that are relevant or not.
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
_FIELD = re.compile(r"(\{(?:instruction|query|document)\})")


@dataclass(frozen=True, eq=False)
class Pooling:
    """Makes an embedding, float32 [D], of the values of a text at the last norm.

    kind, includes_prompt: as in `EmbeddingFormat`. skip: the ids of a prompt that does not count. dimensions: keep only
    the first ones. normalize: divide by the length afterwards.
    """

    kind: str
    skip: int
    dimensions: int | None
    normalize: bool

    @property
    def positions(self) -> TapPositions:
        """Of the values that it takes."""
        return "last" if self.kind == "lasttoken" else "all"

    def __call__(self, taps: Mapping[str, Tensor]) -> Tensor:
        values = taps[NORM]
        if self.kind == "lasttoken":
            pooled = values.to(torch.float32)
        else:
            weights = np.arange(1, len(values) + 1) if self.kind == "weightedmean" else np.ones(len(values))
            pooled = weighted_mean(values[self.skip :], weights[self.skip :])
        pooled = pooled[: self.dimensions]
        # In double precision and one order, whatever the number of threads.
        length = float(np.sqrt(np.square(pooled.double().numpy()).sum()))
        return pooled / max(length, 1e-12) if self.normalize else pooled


@dataclass(frozen=True, eq=False)
class Relevance:
    """Makes the score of a document, float32 [], from 0 to 1, of its last id's values at the last norm.

    score: the head of a classifier, float32 [D]; otherwise the logits of `answers` decide, of a model's head.
    """

    score: Tensor | None
    answers: tuple[int, int | None] | None
    model: Model

    positions: ClassVar[TapPositions] = "last"

    def __call__(self, taps: Mapping[str, Tensor]) -> Tensor:
        values = taps[NORM]
        if self.score is not None:
            logit = np.dot(values.double().numpy(), self.score.double().numpy())
        else:
            assert self.answers is not None, "checked when the request was made"
            yes, no = self.answers
            logits = head_logits(self.model, values.unsqueeze(0))[0]
            logit = float(logits[yes]) - (0.0 if no is None else float(logits[no]))
        return torch.tensor(logit, dtype=torch.float64).sigmoid().to(torch.float32)


@torch.no_grad()
def head_logits(model: Model, normed: Tensor) -> Tensor:
    """float [N, D] at the last norm -> logits [N, V] of the head. Raises `RequestError` for a model of no family."""
    architecture, params = head_of(model)
    if not hasattr(architecture, "logits"):
        raise RequestError("this needs a model of a built-in family, whose head can be computed alone")
    logits: Tensor = architecture.logits(params, normed.to(model.device))
    return logits


@dataclass(frozen=True)
class EmbeddingReader:
    """Makes requests for embeddings and scores. reader: of prompts. format: of the checkpoint."""

    reader: RequestReader
    format: EmbeddingFormat

    def texts(self, texts: Sequence[str | Ids], **options: Unpack[EmbedOptions]) -> list[Request]:
        """A request for the embedding of each text. The errors are those of `LanguageModel.embed`."""
        self._check()
        dimensions, prompt, prompt_name = options.get("dimensions"), options.get("prompt"), options.get("prompt_name")
        width = self.reader.model.taps[NORM].shape[0]
        dimensions = self.format.dimensions if dimensions is None else dimensions
        if dimensions is not None:
            check_whole("dimensions", dimensions, low=1)
            if dimensions > width:
                raise OptionError("dimensions", f"is {dimensions}, but embeddings of this model have {width}")
        before = self._prompt(prompt, prompt_name)
        skip = 0
        if before and not self.format.includes_prompt:
            skip = len(self.reader.prompt_ids(before))
            skip -= self._ends_with_eos(self.reader.prompt_ids(before))
        pooling = Pooling(self.format.pooling, skip, dimensions, options.get("normalize", True))
        has_prompt = prompt is not None or prompt_name is not None
        ids = [self._ids(text, before, has_prompt=has_prompt) for text in texts]
        return self._requests(ids, pooling, options.get("adapter"))

    def pairs(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        template: str | None = None,
        adapter: str | None = None,
    ) -> list[Request]:
        """A request for the score of each document. The errors are those of `LanguageModel.rerank`."""
        if self.format.score is None:
            self.reader.model.check_head()
        answers = self.format.answers or self._answers()
        if self.format.score is None and answers is None:
            raise RequestError(
                'this checkpoint cannot rank documents: it has no head with one label, nor single ids of "yes" and "no"'
            )
        tokenizer = needed_tokenizer(self.reader.tokenizer, "a query")
        if template is None and len(tokenizer.encode("<|im_start|>", add_special_tokens=False)) > 1:
            raise OptionError(
                "template", "is needed for this checkpoint: the layout of a pair, such as 'query: {query}\n{document}'"
            )
        instruction = _INSTRUCTION if instruction is None else instruction
        parts = _FIELD.split(_JUDGE if template is None else template)
        values = [{"{instruction}": instruction, "{query}": query, "{document}": document} for document in documents]
        texts = ["".join(each.get(part, part) for part in parts) for each in values]
        ids = [
            self.reader.prompt_ids(tokenizer.encode(text, add_special_tokens=template is not None)) for text in texts
        ]
        return self._requests(ids, Relevance(self.format.score, answers, self.reader.model), adapter)

    def _requests(self, ids: Sequence[list[int]], result: "Pooling | Relevance", adapter: str | None) -> list[Request]:
        options = GenerateOptions(max_new_tokens=0, temperature=0, taps={NORM: result.positions}, adapter=adapter)
        return self.reader.read([Request(tuple(each), options, pooling=result) for each in ids], {})

    def _check(self) -> None:
        if self.format.problem:
            raise RequestError(f"this checkpoint's embeddings cannot be computed: {self.format.problem}")
        if NORM not in self.reader.model.taps:
            raise RequestError('embeddings are read at the tap "norm", which this model\'s forward does not have')

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        if prompt is not None and name is not None:
            raise OptionError("prompt", "and prompt_name exclude each other: give one of them")
        if prompt is not None:
            return prompt
        name = self.format.default_prompt if name is None else name
        if name is not None and name not in self.format.prompts:
            known = ", ".join(map(repr, self.format.prompts)) or "none"
            raise OptionError("prompt_name", f"names no prompt of this checkpoint, which has {known}; got {name!r}")
        return "" if name is None else self.format.prompts[name]

    def _ids(self, text: str | Ids, prompt: str, *, has_prompt: bool) -> list[int]:
        if isinstance(text, str):
            ids = self.reader.prompt_ids(prompt + text)
            if self.format.adds_eos and not self._ends_with_eos(ids):
                ids = [*ids, self._eos]
        else:
            if has_prompt:
                raise OptionError("prompt", "goes before a text, but the text is given as ids: leave the prompt out")
            ids = self.reader.prompt_ids(text)
        if self.format.max_tokens is not None and len(ids) > self.format.max_tokens:
            raise ContextOverflowError(
                f"the text has {len(ids)} tokens, but the checkpoint embeds at most {self.format.max_tokens}: "
                "shorten it"
            )
        return ids

    @property
    def _eos(self) -> int:
        tokenizer = self.reader.tokenizer
        if tokenizer is None or tokenizer.eos_id is None:
            raise RequestError("the checkpoint ends texts with an eos token, but its tokenizer has none")
        return tokenizer.eos_id

    def _ends_with_eos(self, ids: Sequence[int]) -> bool:
        tokenizer = self.reader.tokenizer
        return tokenizer is not None and bool(ids) and ids[-1] == tokenizer.eos_id

    def _answers(self) -> tuple[int, int] | None:
        tokenizer = self.reader.tokenizer
        if tokenizer is None:
            return None
        yes, no = (tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no"))
        return (yes[0], no[0]) if len(yes) == len(no) == 1 else None
