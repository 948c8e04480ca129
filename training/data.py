"""Token ids of the corpus and the batches made from them.

Each row is one document, and the rows of a batch have similar lengths: attention never crosses documents, every
document starts at position 0 as in inference, and a batch has little padding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import Document
from .tokenizer import END_OF_TEXT, IM_END, token_id

# Few different lengths, so that a compiled step is reused; the last one is the context.
LENGTHS = (64, 160, 224, 256, 320, 448, 640, 1024)
IGNORED = -100
# The share of stories that begin with <|endoftext|>, the BOS. No other document does: stories continue an empty prompt.
BOS_SHARE = 0.5


@dataclass(frozen=True)
class TokenizedCorpus:
    """Concatenated documents: ids int16 [N], bounds int64 [documents + 1], prompts int64 [documents] in tokens."""

    ids: Tensor
    bounds: Tensor
    prompts: Tensor

    def __len__(self) -> int:
        return len(self.prompts)

    def document(self, index: int) -> list[int]:
        start, end = int(self.bounds[index]), int(self.bounds[index + 1])
        ids: list[int] = self.ids[start:end].tolist()
        return ids


def tokenize(tokenizer: Tokenizer, documents: Sequence[Document]) -> TokenizedCorpus:
    """Encode every document, ended by <|endoftext|>. Its prompt is encoded separately, as in inference."""
    end, rng = token_id(tokenizer, END_OF_TEXT), random.Random(len(documents))
    chunks, lengths, prompts = [], [0], []
    for start in range(0, len(documents), 1000):
        some = documents[start : start + 1000]
        given = tokenizer.encode_batch([document.text[: document.prompt] for document in some])
        written = tokenizer.encode_batch([document.text[document.prompt :] for document in some])
        for document, before, after in zip(some, given, written, strict=True):
            from_nothing = document.kind == "story" and not document.prompt and rng.random() < BOS_SHARE
            ids = [*([end] if from_nothing else before.ids), *after.ids, end]
            chunks.append(torch.tensor(ids, dtype=torch.int16))
            lengths.append(len(ids))
            prompts.append(len(before.ids))
    return TokenizedCorpus(torch.cat(chunks), torch.tensor(lengths).cumsum(0), torch.tensor(prompts))


class AnswerFinder:
    """Finds the tokens of a document that belong to short answers, which must be looked up in the text.

    They are a tenth of the tokens and the hardest part, so they get a higher weight in the loss.
    """

    LONGEST = 128  # two calls of tools

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.chat = tokenizer.encode("<|im_start|>assistant\n").ids
        self.chat_begin, self.chat_end = self.chat[0], token_id(tokenizer, IM_END)
        self.plain = tokenizer.encode("Answer:").ids
        vocabulary = tokenizer.get_vocab()
        self.newlines = {index for text, index in vocabulary.items() if "\u010a" in text}  # byte-level BPE's newline
        self.braces = {index for text, index in vocabulary.items() if text.startswith('{"')}

    def flags(self, ids: Sequence[int]) -> list[bool]:
        """True for every token of an answer, including its closing token; in a text without answers, for all tokens."""
        found = [False] * len(ids)
        braces = set() if self.chat_begin in ids[:2] else self.braces  # a chat's other turns may have JSON, too
        for i in range(len(ids)):
            if found[i]:
                continue
            if ids[i : i + len(self.chat)] == self.chat:
                self._mark(found, ids, i + len(self.chat), {self.chat_end})
            elif ids[i : i + len(self.plain)] == self.plain:
                self._mark(found, ids, i + len(self.plain), self.newlines)
            elif ids[i] in braces:
                self._mark(found, ids, i, self.newlines)
        return found if any(found) else [True] * len(ids)

    def _mark(self, found: list[bool], ids: Sequence[int], start: int, ends: set[int]) -> None:
        for stop in range(start, min(len(ids), start + self.LONGEST)):
            if ids[stop] in ends:
                found[start : stop + 1] = [True] * (stop + 1 - start)
                return


def batches(
    corpus: TokenizedCorpus, tokens_per_step: int, seed: int, end_id: int, finder: AnswerFinder, text_share: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs [B, T], targets [B, T]) forever in a seeded order; every epoch is shuffled again.

    Targets are the tokens of stories and answers, and a random share `text_share` of the tokens of all other text. This
    gives answers a higher weight without a second kind of loss. A document's prompt is never a target.
    """
    rng, thinning = random.Random(seed), random.Random(f"{seed} thinning")
    order = list(range(len(corpus)))
    pending: dict[int, list[tuple[list[int], list[int]]]] = {length: [] for length in LENGTHS}
    while True:
        rng.shuffle(order)
        for index in order:
            row, prompt = corpus.document(index), int(corpus.prompts[index])
            targets = [
                token if i >= prompt and (answer or thinning.random() < text_share) else IGNORED
                for i, (token, answer) in enumerate(zip(row, finder.flags(row), strict=True))
            ]
            row, targets = row[: LENGTHS[-1] + 1], targets[: LENGTHS[-1] + 1]
            length = next(length for length in LENGTHS if length >= len(row) - 1)
            pending[length].append((row, targets))
            if len(pending[length]) == max(1, tokens_per_step // length):
                yield _pad(pending[length], length, end_id)
                pending[length] = []


def _pad(rows: Sequence[tuple[list[int], list[int]]], length: int, pad_id: int) -> tuple[Tensor, Tensor]:
    inputs = torch.full((len(rows), length), pad_id)
    targets = torch.full((len(rows), length), IGNORED)
    for i, (row, wanted) in enumerate(rows):
        inputs[i, : len(row) - 1] = torch.tensor(row[:-1])
        targets[i, : len(row) - 1] = torch.tensor(wanted[1:])
    return inputs, targets
