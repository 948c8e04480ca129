"""The transforms that name ids: bias, penalties and bans, of each row from its own options and history."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from onward.errors import NothingToDrawError, RequestError
from onward.sampling.history import History, Ids
from onward.sampling.params import SamplingParams
from onward.sampling.penalties import (
    Entries,
    apply_ban,
    apply_frequency_penalty,
    apply_presence_penalty,
    apply_repetition_penalty,
    apply_shift,
    dry_penalties,
    ngram_ends,
    word_ends,
)

Part = tuple[int, Ids, Ids | Sequence[float] | float]  # as `Entries.of` takes them
# (index among the rows of the logits, its options, what it has seen)
Place = tuple[int, SamplingParams, History]


class Adjustments:
    """What is done to logits before temperature and filters, in the order of docs/sampling.md.

    An option that no row uses costs nothing. needs_history: whether some row's options look at what came before.
    """

    def __init__(self, rows: Sequence[SamplingParams], device: torch.device | None) -> None:
        self._rows = rows
        self._device = torch.device("cpu") if device is None else device
        self.needs_history = any(map(_looks_back, rows))
        self.any = self.needs_history or any(row.logit_bias for row in rows)
        self._bans = any(map(_bans, rows))
        self._named = max((token for row in rows for token in _named_ids(row)), default=-1)
        for row in rows:
            if texts := [word for word in row.bad_words if isinstance(word, str)]:
                raise RequestError(f"bad_words holds the text {texts[0]!r}: a Sampler knows no tokenizer, give its ids")

    def __call__(
        self, logits: Tensor, histories: Sequence[History] | None, drafts: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """float32 [B, K, V] -> the same, as `Sampler` explains.

        Raises:
            RequestError: an id outside the vocabulary, no histories where they are needed, or nothing left to draw.
        """
        batch, positions, vocab = logits.shape
        if self._named >= vocab:
            raise RequestError(
                f"logit_bias, bad_words or eos names id {self._named}, but the vocabulary ends at {vocab - 1}"
            )
        if histories is None:
            if self.needs_history:
                raise RequestError("penalties, DRY, n-grams, bad words and min_new_tokens need the rows' histories")
            histories = [History(()) for _ in self._rows]
        if len(histories) != batch:
            raise RequestError(f"the sampler was called with {batch} rows and {len(histories)} histories")
        parts = _Parts()
        for place in _places(self._rows, histories, drafts, positions):
            parts.note(place)
        flat = logits.reshape(batch * positions, vocab)
        return self._checked(parts.apply(flat, self._device), flat).view(logits.shape)

    def _checked(self, adjusted: Tensor, before: Tensor) -> Tensor:
        if self._bans:
            empty = (adjusted.amax(-1) == float("-inf")) & (before.amax(-1) > float("-inf"))
            if bool(empty.any()):
                raise NothingToDrawError(
                    "logit_bias, bad_words, no_repeat_ngram_size and min_new_tokens together ban every id: nothing is "
                    "left to draw"
                )
        return adjusted


class _Parts:
    """What the rows contribute to each transform."""

    def __init__(self) -> None:
        self._bias: list[Part] = []
        self._repetition: list[Part] = []
        self._presence: list[Part] = []
        self._frequency: list[Part] = []
        self._dry: list[Part] = []
        self._banned: list[Part] = []
        self._penalties: dict[int, tuple[float, float]] = {}

    def note(self, place: Place) -> None:
        at, row, history = place
        if row.logit_bias:
            tokens, values = zip(*_bias(row), strict=True)
            self._bias.append((at, np.array(tokens, dtype=np.int64), values))
        if row.repetition_penalty != 1:
            self._repetition.append((at, history.seen[0].copy(), row.repetition_penalty))
        if row.presence_penalty or row.frequency_penalty:
            self._penalties[at] = (row.presence_penalty, row.frequency_penalty)
            ids, counts = (array.copy() for array in history.drawn)
            if row.presence_penalty:
                self._presence.append((at, ids, counts))
            if row.frequency_penalty:
                self._frequency.append((at, ids, counts))
        if row.dry_multiplier:
            costs = dry_penalties(
                history.ids,
                multiplier=row.dry_multiplier,
                base=row.dry_base,
                allowed_length=row.dry_allowed_length,
                breakers=row.dry_sequence_breakers,
            )
            self._dry.append((at, np.array(list(costs), dtype=np.int64), [-cost for cost in costs.values()]))
        if len(banned := _banned_ids(row, history)):
            self._banned.append((at, banned, 0.0))

    def apply(self, logits: Tensor, device: torch.device) -> Tensor:
        penalties = torch.tensor(
            [self._penalties.get(at, (0.0, 0.0)) for at in range(len(logits))], dtype=torch.float32, device=device
        )
        steps: list[tuple[list[Part], Callable[[Tensor, Entries], Tensor]]] = [
            (self._bias, apply_shift),
            (self._repetition, apply_repetition_penalty),
            (self._presence, lambda x, drawn: apply_presence_penalty(x, drawn, penalties[:, 0])),
            (self._frequency, lambda x, drawn: apply_frequency_penalty(x, drawn, penalties[:, 1])),
            (self._dry, apply_shift),
            (self._banned, apply_ban),
        ]
        for parts, transform in steps:
            if parts:
                logits = transform(logits, Entries.of(parts, device))
        return logits


def _places(
    rows: Sequence[SamplingParams],
    histories: Sequence[History],
    drafts: Sequence[Sequence[int]] | None,
    positions: int,
) -> Iterator[Place]:
    """Every position of every row, with the history that it would have."""
    for index, (row, history) in enumerate(zip(rows, histories, strict=True)):
        draft = () if drafts is None else drafts[index]
        for place in range(positions):
            with history.assuming(draft[:place]):
                yield index * positions + place, row, history


def _banned_ids(row: SamplingParams, history: History) -> Ids:
    found: list[Ids] = []
    if row.no_repeat_ngram_size:
        found.append(ngram_ends(history.ids, row.no_repeat_ngram_size))
    if row.bad_words:
        found.append(word_ends(history.ids, [word for word in row.bad_words if not isinstance(word, str)]))
    if history.output_length < row.min_new_tokens and row.eos and not row.ignore_eos:
        found.append(np.array(row.eos, dtype=np.int64))
    return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)


def _looks_back(row: SamplingParams) -> bool:
    return bool(
        row.repetition_penalty != 1
        or row.presence_penalty
        or row.frequency_penalty
        or row.dry_multiplier
        or row.no_repeat_ngram_size
        or row.bad_words
        or _holds_eos_back(row)
    )


def _holds_eos_back(row: SamplingParams) -> bool:
    return bool(row.min_new_tokens and row.eos and not row.ignore_eos)


def _bans(row: SamplingParams) -> bool:
    banning = any(value == float("-inf") for _, value in _bias(row))
    return bool(banning or row.no_repeat_ngram_size or row.bad_words or _holds_eos_back(row))


def _bias(row: SamplingParams) -> tuple[tuple[int, float], ...]:
    assert isinstance(row.logit_bias, tuple)  # a mapping was made one
    return row.logit_bias


def _named_ids(row: SamplingParams) -> Iterator[int]:
    yield from (token for token, _ in _bias(row))
    for word in row.bad_words:
        if not isinstance(word, str):
            yield from word
    if _holds_eos_back(row):
        yield from row.eos or ()
