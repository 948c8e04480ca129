"""Token ids of the corpus and the batches made from them.

One document a row, rows of similar length in a batch: attention never crosses documents, every
document starts at position 0 as it will in use, and little of a batch is padding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .tokenizer import END_OF_TEXT, IM_END, token_id

# Few lengths, so that a compiled step is reused; the last one is the context.
LENGTHS = (64, 160, 224, 256, 320, 448, 640, 1024)
IGNORED = -100
# Some rows begin with <|endoftext|>, the tokenizer's BOS, so that text can start from nothing.
BOS_SHARE = 0.25


@dataclass(frozen=True)
class TokenizedCorpus:
    """Documents end to end: ids int16 [N], and bounds int64 [documents + 1]."""

    ids: Tensor
    bounds: Tensor

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def document(self, index: int) -> list[int]:
        start, end = int(self.bounds[index]), int(self.bounds[index + 1])
        ids: list[int] = self.ids[start:end].tolist()
        return ids


def tokenize(tokenizer: Tokenizer, texts: Sequence[str]) -> TokenizedCorpus:
    """Encode every text, each closed by <|endoftext|>."""
    end = token_id(tokenizer, END_OF_TEXT)
    chunks, lengths = [], [0]
    for start in range(0, len(texts), 1000):
        encoded = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts[start : start + 1000])]
        lengths += [len(ids) for ids in encoded]
        chunks.append(torch.tensor([i for ids in encoded for i in ids], dtype=torch.int16))
    return TokenizedCorpus(torch.cat(chunks), torch.tensor(lengths).cumsum(0))


class AnswerFinder:
    """Tells which tokens of a document belong to short answers: those that must be looked up in the text.

    They are a tenth of the tokens and the hardest part, so the loss should hear them louder.
    """

    LONGEST = 80

    def __init__(self, tokenizer: Tokenizer, longest: int = LONGEST) -> None:
        self.longest = longest
        self.chat = tokenizer.encode("<|im_start|>assistant\n").ids
        self.chat_begin, self.chat_end = self.chat[0], token_id(tokenizer, IM_END)
        self.plain = tokenizer.encode("Answer:").ids
        vocabulary = tokenizer.get_vocab()
        self.newlines = {index for text, index in vocabulary.items() if "\u010a" in text}  # byte-level BPE's newline
        self.braces = {index for text, index in vocabulary.items() if text.startswith('{"')}

    def flags(self, ids: Sequence[int]) -> list[bool]:
        """True for every token of an answer, its closing token included."""
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
        return found

    def _mark(self, found: list[bool], ids: Sequence[int], start: int, ends: set[int]) -> None:
        for stop in range(start, min(len(ids), start + self.longest)):
            if ids[stop] in ends:
                found[start : stop + 1] = [True] * (stop + 1 - start)
                return


def batches(
    corpus: TokenizedCorpus, tokens_per_step: int, seed: int, end_id: int, finder: AnswerFinder, text_share: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs [B, T], targets [B, T]) in a seeded order; every epoch is shuffled anew.

    Of the tokens outside answers only `text_share`, drawn at random, are targets: it weighs answers up
    without a second kind of loss.
    """
    rng, thinning = random.Random(seed), random.Random(f"{seed} thinning")
    order = list(range(len(corpus)))
    pending: dict[int, list[list[int]]] = {length: [] for length in LENGTHS}
    while True:
        rng.shuffle(order)
        for index in order:
            row = corpus.document(index)
            if rng.random() < BOS_SHARE:
                row = [end_id, *row]
            row = row[: LENGTHS[-1] + 1]
            length = next(length for length in LENGTHS if length >= len(row) - 1)
            pending[length].append(row)
            if len(pending[length]) == max(1, tokens_per_step // length):
                inputs, targets = _pad(pending[length], length, end_id)
                yield inputs, _thin(targets, pending[length], finder, text_share, thinning)
                pending[length] = []


def _thin(
    targets: Tensor, rows: Sequence[list[int]], finder: AnswerFinder, text_share: float, rng: random.Random
) -> Tensor:
    if text_share == 1.0:
        return targets
    for i, row in enumerate(rows):
        kept = [answer or rng.random() < text_share for answer in finder.flags(row)]
        dropped = ~torch.tensor(kept[1:])
        targets[i, : len(row) - 1][dropped] = IGNORED
    return targets


def _pad(rows: list[list[int]], length: int, pad_id: int) -> tuple[Tensor, Tensor]:
    inputs = torch.full((len(rows), length), pad_id)
    targets = torch.full((len(rows), length), IGNORED)
    for i, row in enumerate(rows):
        inputs[i, : len(row) - 1] = torch.tensor(row[:-1])
        targets[i, : len(row) - 1] = torch.tensor(row[1:])
    return inputs, targets
