"""Replay: texts from elsewhere, verified as one draft each: the ids that the sampler draws at all of their positions.

Speculative decoding verifies a draft up to the first id that differs. A replay verifies all of the text: each position
is drawn as if the ids before it had been drawn, in the same call of the sampler as a draft.
"""

from collections import abc
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from onward.decoding.batch import LogitsNeeded, ScheduledSequence, batches, needs_of, processed
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.decoding.step import Emitted, missing_logprobs, sampling_of
from onward.errors import NothingToDrawError
from onward.models import Run
from onward.sampling import Sampler
from onward.sampling.logprobs import TokenLogprobs, checked_ids


class ReplayedSequence(Sequence):
    """A sequence whose output is known. It takes the ids up to its end, or up to one that its constraint forbids.

    drawn: the ids that the sampler draws; None where the other options ban all ids. It grows until it has one for each
        of `token_ids`, and one for a forbidden id after them.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.drawn: list[int | None] = []
        self._positions = 0  # to draw
        self._before = self  # this sequence as it was before the first id of `token_ids` that is not drawn yet
        self._sampler: Sampler | None = None

    def set_output(self, token_ids: abc.Sequence[int]) -> None:
        """Take the known output, once."""
        assert not self.token_ids, "replayed ids come first"
        self._before = self.fork()
        self.replayed = len(token_ids)
        for token in token_ids:
            if self.finish_reason is not None or not (self.constraint is None or self.constraint.admits(token)):
                break
            self.accept(token)
        is_cut = self.finish_reason is None and len(self.token_ids) < len(token_ids)
        self._positions = len(self.token_ids) + is_cut

    @property
    def longest(self) -> int:
        return self.length

    @property
    def pending(self) -> int:
        return 0 if self.scoring_from is None else self.output_at + self._positions - 1 - self.computed

    @property
    def scoring_from(self) -> int | None:
        return self.output_at + len(self.drawn) - 1 if len(self.drawn) < self._positions else None

    def draws(self, logits: Tensor) -> list[int | None]:
        """The ids drawn from logits [T, V] at the next positions. Changes nothing."""
        if self._sampler is None:
            self._sampler = Sampler([sampling_of(self)], logits.device)
        first = len(self.drawn)
        return self._draws(self._sampler, logits, self.output_at + first, self.token_ids[first : first + len(logits)])

    def _draws(self, sampler: Sampler, logits: Tensor, position: int, ids: list[int]) -> list[int | None]:
        before, count = self._before, len(logits)
        positions = torch.arange(position, position + count, dtype=torch.int32, device=logits.device).unsqueeze(0)
        histories = [before.read_history()] if sampler.needs_history else None
        constraints = None if before.constraint is None else [before.constraint]
        try:
            picked = sampler(logits.unsqueeze(0), positions, histories, [ids[: count - 1]], constraints)
        except NothingToDrawError:
            if count == 1:
                return [None]
        else:
            return list(checked_ids(picked.squeeze(0), logits))
        half = count // 2
        drawn = self._draws(sampler, logits[:half], position, ids[:half])
        with ExitStack() as stack:
            for state in (before.history, before.constraint):
                if state is not None:
                    stack.enter_context(state.assuming(ids[:half]))
            return [*drawn, *self._draws(sampler, logits[half:], position + half, ids[half:])]

    def take_draws(self, drawn: list[int | None], logprobs: list[TokenLogprobs]) -> None:
        """Add the results of a step."""
        before, first = self._before, len(self.drawn)
        for token in self.token_ids[first : first + len(drawn)]:
            before.token_ids.append(token)
            for state in (before.history, before.constraint):
                if state is not None:
                    state.append(token)
        self.drawn += drawn
        self.logprobs += logprobs


class ReplayStep:
    """A `Step` for `ReplayedSequence`s. It emits nothing."""

    def __init__(self, run: Run, slots: CacheManager) -> None:
        self._run, self._slots = run, slots

    @torch.no_grad()
    def __call__(self, work: abc.Sequence[ScheduledSequence]) -> Emitted:
        results = []
        for indices, needs in batches(work, self._slots):
            items = [work[index] for index in indices]
            logits, _ = processed(self._run, self._slots, items, needs, self._run.model.device)
            if logits is None:
                continue
            for item, after in zip(items, logits, strict=True):
                if needs_of(item) is LogitsNeeded.ALL:
                    results.append(_results(item, after[: item.tokens]))
        for sequence, drawn, logprobs in results:
            sequence.take_draws(drawn, logprobs)
        return [[] for _ in work]


def _results(item: ScheduledSequence, logits: Tensor) -> tuple[ReplayedSequence, list[int | None], list[TokenLogprobs]]:
    sequence = item.sequence
    assert isinstance(sequence, ReplayedSequence), "a replay has no other sequences"
    first = sequence.scoring_from
    assert first is not None, "logits are needed for ids to draw"
    return sequence, sequence.draws(logits[first - sequence.computed :]), missing_logprobs(item, logits)[1]
